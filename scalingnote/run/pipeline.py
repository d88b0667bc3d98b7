"""A run: its stages one after another, and the place of each artifact.

An artifact is at ``{run_dir}/{stage}/{fingerprint}``: equal settings and inputs give the same place. So a
second run skips finished stages, a changed setting builds a new artifact next to the old one, and methods
with a common stage share its artifact.
"""

import contextlib
from collections.abc import Mapping, Sequence

import yaml

from scalingnote.core.config import dump, validate
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import configure_unless_set, elapsed_status, get_logger, status_lines
from scalingnote.encode import engines
from scalingnote.encode.config import IngestConfig
from scalingnote.evaluate.experiment.config import ExperimentConfig
from scalingnote.run import stages
from scalingnote.run.config import RunConfig
from scalingnote.run.stages import Stage
from scalingnote.storage import filesystem as fs
from scalingnote.storage import usage
from scalingnote.storage.artifact import MANIFEST, Artifact, fingerprint, open_artifact

RUN_FILE = "run.yaml"
ROW_COUNTS = (
    "rows",
    "documents",
    "triplets",
    "train",
    "queries",
)  # of an artifact: the first that it has is its size
log = get_logger("pipeline")


def run(
    config: RunConfig, chosen: Sequence[Stage] | None = None, *, record: bool = True
) -> dict[str, Artifact]:
    """Run the chosen stages (default: all) in order, skipping finished ones, and return kind -> artifact.

    `record`: when the run is finished, `search` and `serve` open it, and its report is copied to the top of
    run_dir.
    """
    configure_unless_set()
    chosen = stages.of(config) if chosen is None else list(chosen)
    artifacts: dict[str, Artifact] = {}
    started = False
    opened: dict[str, Artifact] = {}  # by stage: many stages share ancestors
    for number, stage in enumerate(chosen, 1):
        if record and stage.builds == "report":  # early: the index can be served even if evaluation fails
            make_current(config)
        parents, uri = _place(config, stage, opened)
        if fs.exists(fs.join(uri, MANIFEST)):
            artifacts[stage.builds] = opened[stage.name] = open_artifact(uri, kind=stage.builds)
            log.info("%d/%d %s: finished before, %s", number, len(chosen), stage.name, uri)
            continue
        log.info("%d/%d %s", number, len(chosen), stage.name)
        with status_lines("pipeline", elapsed_status(stage.name)):
            from scalingnote.core import cluster  # late: importing Ray takes longer than --help

            cluster.connect(config.address, nodes_wait_s=config.nodes_wait_s)
            if not started and any(later.builds == "embeddings" for later in chosen[number - 1 :]):
                engines.check_installed(config.encode)  # before hours of training
            started = True
            artifact = stage.function()(
                getattr(config, stage.section),
                **{kind: parent.uri for kind, parent in parents.items()},
                output=uri,
            )
        artifacts[stage.builds] = opened[stage.name] = artifact
        info = artifact.manifest.info
        log.info("%s -> %s  (%.1fs)", stage.name, uri, info["seconds"])
        if "usage" in info:  # missing if an earlier release built it
            rows = next((artifact.counts[name] for name in ROW_COUNTS if name in artifact.counts), None)
            log.info("%s: %s", stage.name, usage.summary(info["usage"], info["seconds"], rows))
    if record:
        make_current(config)
        if "report" in artifacts:
            publish(artifacts["report"], config.run_dir)
    return artifacts


def make_current(config: RunConfig) -> None:
    """Write a config to run.yaml of its directory: `search`, `serve` and `ingest` open this run."""
    fs.write_bytes(fs.join(config.run_dir, RUN_FILE), yaml.safe_dump(dump(config)).encode())


def find_finished(config: RunConfig) -> dict[str, Artifact]:
    """Open the finished artifacts of a config, by stage, as far as their inputs are finished too."""
    opened: dict[str, Artifact] = {}
    order = stages.of(config)
    for number, stage in enumerate(order, 1):
        with contextlib.suppress(ArtifactError):
            _newest(config, stage.builds, order[:number], opened)
    return opened


def locate(config: RunConfig, kind: str) -> Artifact:
    """Open the finished artifact of `kind` of a config; if it is missing, ArtifactError names its stage."""
    return _newest(config, kind, stages.of(config), {})


def query_terms(config: RunConfig) -> Artifact | None:
    """Open the artifact with ``sparse_query/`` for the terms of the index; None if the index has no terms."""
    if not locate(config, "index").read_json("index.json").get("sparse"):
        return None
    return locate(config, "dual_encoder" if config.bm25 is None else "bm25_terms")


def teacher(config: RunConfig) -> Artifact:
    """Open the tower that encoded the documents, for queries that its student is uncertain about.

    Raises:
        ConfigError: the run has no such student, or another part determines the embedding of a query.
    """
    if config.distill is None or config.distill.document is not None or config.fuse is not None:
        raise ConfigError(
            "this run has no student that searches the embeddings of its teacher: do not escalate"
        )
    if config.cross_encoder is not None:
        raise ConfigError("a cross-encoder cannot encode a query without a document: do not escalate")
    _require_tower(config)
    return locate(config, "dual_encoder")


def document_tower(config: RunConfig) -> Artifact:
    """Open the tower that encoded the documents and encodes new ones.

    Raises:
        ConfigError: a cross-encoder or an endpoint encoded the documents.
    """
    if "encode_student" in [stage.name for stage in stages.of(config)]:
        return locate(config, "student")
    if config.cross_encoder is not None:
        raise ConfigError("a cross-encoder encoded the documents of this run, and cannot encode new ones")
    _require_tower(config)
    return locate(config, "dual_encoder")


def _require_tower(config: RunConfig) -> None:
    if config.endpoint is not None:
        raise ConfigError(
            f"{config.endpoint.address} encodes the documents of this run, and only `scalingnote distill` "
            "and `run` call it: add new documents to the texts and run again, and do not escalate"
        )


def load_run(run_dir: str) -> RunConfig:
    """Read the config of the last run in `run_dir`, with this path as its run_dir in case it has moved."""
    path = fs.join(run_dir, RUN_FILE)
    if (text := fs.read_if_exists(path)) is None:
        raise ConfigError(f"no run at {run_dir}: run `scalingnote run CONFIG --set run_dir={run_dir}`")
    config = validate(RunConfig, yaml.safe_load(text), source=path)
    return config.model_copy(update={"run_dir": run_dir})


def ingest(
    config: IngestConfig, path: str, *, run_dir: str, columns: Mapping[str, str] | None = None
) -> Artifact:
    """Encode new documents with the models of the last run in `run_dir`.

    `columns` maps our names to those of the file; the mapping of the run applies to its columns that the file
    has too.
    """
    from scalingnote.run import ingest as job  # late, as above

    last_run = load_run(run_dir)
    table_file = getattr(last_run.dataset, "documents", last_run.dataset)
    new = job.describe_file(
        path,
        dict(columns or {}),
        like=locate(last_run, "dataset"),
        made_by=getattr(table_file, "columns", {}),
    )
    return job.run(
        config,
        new,
        towers=document_tower(last_run),
        semantic_ids=locate(last_run, "semantic_ids"),
        embeddings=locate(last_run, "embeddings"),
        bm25_terms=None if last_run.bm25 is None else locate(last_run, "bm25_terms"),
        output=job.output_uri(run_dir, new),
    )


def experiment(config: ExperimentConfig) -> Artifact:
    """Build the report on an experiment with the last run in its `run_dir`, from access logs."""
    from scalingnote.evaluate.experiment import job  # late, as above

    dataset = locate(load_run(config.run_dir), "dataset")
    return job.run(config, dataset=dataset.uri, output=fs.join(config.run_dir, "experiment"))


def ladder(config: RunConfig) -> Artifact:
    """Train stage I at every model and data size of `config.ladder`, and fit the scaling laws.

    Finished rungs are not trained again.

    Raises:
        ConfigError: a rung cannot be trained; raised before the first training.
    """
    from scalingnote.plan.ladder import build, rung_configs  # late, as above

    if config.cross_encoder is not None or config.rounds > 1:
        raise ConfigError("a ladder needs a single round of stage I: leave cross_encoder and rounds out")
    run(config, stages.select(config, until="collect"), record=False)
    rows = locate(config, "triplets").counts["train"]
    towers = []
    rungs = rung_configs(config.ladder, config.train, rows=rows)
    for number, train in enumerate(rungs, 1):
        log.info("rung %d/%d", number, len(rungs))
        sized = config.model_copy(update={"train": train})
        towers.append(run(sized, stages.select(sized, only="train"), record=False)["dual_encoder"])
    return build(config.ladder, towers, output=fs.join(config.run_dir, "ladder"))


def publish(report: Artifact, run_dir: str) -> None:
    """Copy a report to the top of the run directory, where users look for it."""
    for name in report.names("report."):
        fs.write_bytes(fs.join(run_dir, name), report.read_bytes(name))


def _newest(config: RunConfig, kind: str, order: Sequence[Stage], opened: dict[str, Artifact]) -> Artifact:
    """Open the artifact of the last stage in `order` that builds `kind`.

    `opened` caches artifacts by stage, because many stages share ancestors.
    """
    stage = next((stage for stage in reversed(order) if stage.builds == kind), None)
    if stage is None:
        raise ArtifactError(f"this run builds no {kind}: its stages are {', '.join(s.name for s in order)}")
    if stage.name not in opened:
        _, uri = _place(config, stage, opened)
        if not fs.exists(fs.join(uri, MANIFEST)):
            raise ArtifactError(
                f"no {kind} for this config in {config.run_dir}: run stage {stage.name!r} first"
            )
        opened[stage.name] = open_artifact(uri, kind=kind)
    return opened[stage.name]


def _place(config: RunConfig, stage: Stage, opened: dict[str, Artifact]) -> tuple[dict[str, Artifact], str]:
    """Return the parents (finished, by kind) and the URI of a stage's artifact."""
    order = stages.of(config)
    before = order[: order.index(stage)]
    parents = {kind: _newest(config, kind, before, opened) for kind in stage.reads}
    for name, builder in stage.earlier:
        until = next(number for number, earlier in enumerate(before) if earlier.name == builder)
        parents[name] = _newest(config, before[until].builds, before[: until + 1], opened)
    mark = fingerprint(stage.builds, getattr(config, stage.section), parents)
    # All rounds share the folder of the stage, because a single round is also the first of two.
    folder = stage.name.partition("@")[0]
    return parents, fs.absolute(fs.join(config.run_dir, folder, mark[:12]))
