"""The run: its config, the order of its stages, and where each artifact lies.

An artifact lies at ``{run_dir}/{stage}/{fingerprint}``: same settings and inputs, same place. So a re-run
skips what is finished, a changed knob never overwrites old work, and methods that share a stage share
its artifact.
"""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import yaml
from pydantic import Field, model_validator

from scalingnote.collect.config import CollectConfig
from scalingnote.config import Config, dump, validate
from scalingnote.cross_encoder.config import DualPooledConfig
from scalingnote.datasets.config import AnyDataset
from scalingnote.distill.config import DistillConfig
from scalingnote.encode.config import EncodeConfig, TeacherConfig
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.experiment.config import ExperimentConfig
from scalingnote.fuse.config import FuseConfig
from scalingnote.index.config import IndexConfig
from scalingnote.ingest.config import IngestConfig
from scalingnote.log import get_logger
from scalingnote.mine.config import MineConfig
from scalingnote.planner.config import PlannerConfig, Statistics
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.scaling.config import LadderConfig
from scalingnote.serving.config import ServeConfig
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, fingerprint, open_artifact
from scalingnote.train.config import TrainConfig

RUN_FILE = "run.yaml"
log = get_logger("pipeline")


class RunConfig(Config):
    """Everything a run needs, one section per stage."""

    run_dir: str = Field("runs/default", description="where artifacts go: a path or a URI (s3://...)")
    address: str | None = Field(None, description="Ray cluster; None starts a private local one")
    dataset: AnyDataset
    planner: PlannerConfig = Statistics()
    collect: CollectConfig = CollectConfig()
    rounds: int = Field(
        1, ge=1, description="of stage I; each but the first trains on negatives mined with the one before"
    )
    mine: MineConfig = MineConfig()
    train: TrainConfig = TrainConfig()
    cross_encoder: DualPooledConfig | None = Field(
        None, description="a teacher in place of stage I's dual encoder (EmbedDistill, section 4.2)"
    )
    teacher: TeacherConfig = TeacherConfig()
    distill: DistillConfig | None = Field(DistillConfig(), description="null: serve stage I's query tower")
    encode: EncodeConfig = EncodeConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    fuse: FuseConfig | None = Field(None, description="null: what is indexed is the documents' embeddings")
    index: IndexConfig = IndexConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    serve: ServeConfig = ServeConfig()
    ladder: LadderConfig = LadderConfig()

    @model_validator(mode="after")
    def _has_a_query_tower(self) -> "RunConfig":
        if self.cross_encoder is not None and self.distill is None:
            raise ValueError("a cross-encoder has no query tower to serve: give it a student, set distill")
        if self.cross_encoder is not None and self.rounds > 1:
            raise ValueError("rounds are of stage I, which cross_encoder takes the place of: set rounds to 1")
        return self


@dataclass(frozen=True)
class Stage:
    """One box of the picture: what it builds, from what, and the job that does it.

    It reads the newest artifact of a kind that the stages before it built. What it `may_read` is for
    :func:`stages` to say, by the config. One that is not the newest of its kind has a name of its own and
    stands in `by_stage`, with the stage that built it.
    """

    name: str
    builds: str
    reads: tuple[str, ...]
    section: str
    job: str
    may_read: tuple[str, ...] = ()
    by_stage: tuple[tuple[str, str], ...] = ()


STAGES: tuple[Stage, ...] = (
    Stage("prepare", "dataset", (), "dataset", "scalingnote.datasets.job:run"),
    Stage("planner", "planner", ("dataset",), "planner", "scalingnote.planner.job:run"),
    Stage("collect", "triplets", ("dataset", "planner"), "collect", "scalingnote.collect.job:run"),
    Stage("train", "dual_encoder", ("dataset", "triplets"), "train", "scalingnote.train.job:run"),
    Stage(
        "cross_encoder",
        "cross_encoder",
        ("dataset", "triplets"),
        "cross_encoder",
        "scalingnote.cross_encoder.job:run",
    ),
    Stage(
        "teacher",
        "query_embeddings",
        ("triplets", "dual_encoder"),
        "teacher",
        "scalingnote.encode.job:run_queries",
    ),
    Stage(
        "distill",
        "student",
        ("query_embeddings",),
        "distill",
        "scalingnote.distill.job:run",
        may_read=("triplets", "embeddings", "dataset"),
    ),
    Stage("encode", "embeddings", ("dataset", "dual_encoder"), "encode", "scalingnote.encode.job:run"),
    Stage(
        "encode_student",
        "embeddings",
        ("dataset", "student"),
        "encode",
        "scalingnote.encode.job:run_student",
    ),
    Stage(
        "mine",
        "triplets",
        ("dataset", "triplets", "dual_encoder", "embeddings"),
        "mine",
        "scalingnote.mine.job:run",
    ),
    Stage("quantize", "semantic_ids", ("embeddings",), "quantize", "scalingnote.quantize.job:run"),
    Stage(
        "fuse",
        "embeddings",
        ("dataset", "planner", "embeddings", "semantic_ids"),
        "fuse",
        "scalingnote.fuse.job:run",
        may_read=("dual_encoder", "student"),
    ),
    Stage(
        "index",
        "index",
        ("dataset", "embeddings", "semantic_ids"),
        "index",
        "scalingnote.index.job:run",
        may_read=("dual_encoder", "student"),
    ),
    Stage(
        "evaluate",
        "report",
        ("dataset", "embeddings", "index"),
        "evaluate",
        "scalingnote.evaluate.job:run",
        may_read=("dual_encoder", "student", "teacher_embeddings"),
    ),
)
# What a cross-encoder leaves behind as a teacher: the same artifacts, of the same stages.
OF_CROSS_ENCODER: tuple[Stage, ...] = (
    Stage(
        "teacher",
        "query_embeddings",
        ("dataset", "triplets", "cross_encoder"),
        "teacher",
        "scalingnote.cross_encoder.job:run_queries",
    ),
    Stage(
        "encode",
        "embeddings",
        ("dataset", "cross_encoder"),
        "encode",
        "scalingnote.cross_encoder.job:run_documents",
    ),
)
NAMES = tuple(stage.name for stage in STAGES)
_ROUND = ("train", "encode", "mine")


def stages(config: RunConfig) -> list[Stage]:
    """The stages this config asks for, in order: without a distill section there is no student.

    A round of stage I before the last is ``train@1``, ``encode@1``, ``mine@1``, and so on.
    """
    known = {stage.name: stage for stage in STAGES}
    if config.cross_encoder is not None:
        known |= {stage.name: stage for stage in OF_CROSS_ENCODER}
    earlier = [
        replace(known[name], name=f"{name}@{number}") for number in range(1, config.rounds) for name in _ROUND
    ]
    first = [known[name] for name in ("prepare", "planner", "collect")]
    return [
        *first,
        *earlier,
        *_last_round(config, known),
        known["quantize"],
        *_fused(config, known),
        _with_query_tower(config, known["index"]),
        _evaluate(config, known),
    ]


def _last_round(config: RunConfig, known: Mapping[str, Stage]) -> list[Stage]:
    """The teacher, and the student if there is one."""
    top = known["train" if config.cross_encoder is None else "cross_encoder"]
    if config.distill is None:
        return [top, known["encode"]]
    distill = replace(known["distill"], reads=(*known["distill"].reads, *config.distill.reads), may_read=())
    if not config.distill.reads:
        return [top, known["teacher"], distill, known["encode"]]
    again = [known["encode_student"]] if config.distill.document else []
    return [top, known["teacher"], known["encode"], distill, *again]


def _fused(config: RunConfig, known: Mapping[str, Stage]) -> list[Stage]:
    """The stage that merges features in, if any."""
    return [] if config.fuse is None else [_with_query_tower(config, known["fuse"])]


def _with_query_tower(config: RunConfig, stage: Stage) -> Stage:
    """A stage that reads the query tower that serves."""
    tower = "dual_encoder" if config.distill is None else "student"
    return replace(stage, reads=(*stage.reads, tower), may_read=())


def _evaluate(config: RunConfig, known: Mapping[str, Stage]) -> Stage:
    """Every query tower is measured in the documents' embeddings that it was trained with."""
    stage = known["evaluate"]
    towers = () if config.cross_encoder is not None else ("dual_encoder",)
    students = () if config.distill is None else ("student",)
    own = config.distill is not None and (config.distill.document is not None or config.fuse is not None)
    apart = towers and own
    return replace(
        stage,
        reads=(*stage.reads, *towers, *students),
        may_read=(),
        by_stage=(("teacher_embeddings", "encode"),) if apart else (),
    )


def select(
    config: RunConfig, *, only: str | None = None, start: str | None = None, until: str | None = None
) -> list[Stage]:
    """The stages named by ``--only``, ``--from`` and ``--until``."""
    wanted = stages(config)
    names = [stage.name for stage in wanted]
    for name in (only, start, until):
        if name is not None and name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no stage {name!r} in this run; it has {', '.join(names)}{hint}")
    if only:
        start = until = only
    first = names.index(start) if start else 0
    last = names.index(until) if until else len(names) - 1
    return wanted[first : last + 1]


def run(
    config: RunConfig, chosen: Sequence[Stage] | None = None, *, record: bool = True
) -> dict[str, Artifact]:
    """Run the chosen stages (default: all) in order, skipping finished ones; returns kind -> artifact.

    `record` makes this the run that `search` and `serve` find, and puts its report at the top of run_dir.
    """
    chosen = stages(config) if chosen is None else list(chosen)
    if record:
        fs.write_bytes(fs.join(config.run_dir, RUN_FILE), yaml.safe_dump(dump(config)).encode())
    built: dict[str, Artifact] = {}
    for number, stage in enumerate(chosen, 1):
        parents, uri = _place(config, stage, {})
        if _finished(uri):
            built[stage.builds] = open_artifact(uri, kind=stage.builds)
            log.info("%d/%d %s: finished before, %s", number, len(chosen), stage.name, uri)
            continue
        log.info("%d/%d %s", number, len(chosen), stage.name)
        from scalingnote import cluster  # late: importing Ray takes longer than showing --help

        cluster.connect(config.address)
        module, function = stage.job.split(":")
        job = getattr(importlib.import_module(module), function)
        artifact = job(
            getattr(config, stage.section),
            **{kind: parent.uri for kind, parent in parents.items()},
            output=uri,
        )
        built[stage.builds] = artifact
        log.info("%s -> %s  (%.1fs)", stage.name, uri, artifact.manifest.info["seconds"])
    if record and "report" in built:
        publish(built["report"], config.run_dir)
    return built


def locate(config: RunConfig, kind: str) -> Artifact:
    """The finished artifact of `kind` that this config names; ArtifactError tells which stage to run."""
    return _newest(config, kind, stages(config), {})


def load_run(run_dir: str) -> RunConfig:
    """The config of the last run in `run_dir`, wherever that directory lies now."""
    path = fs.join(run_dir, RUN_FILE)
    if not fs.exists(path):
        raise ConfigError(f"no run at {run_dir}: `scalingnote run CONFIG --set run_dir={run_dir}` makes one")
    config = validate(RunConfig, yaml.safe_load(fs.read_bytes(path)), source=path)
    return config.model_copy(update={"run_dir": run_dir})


def ingest(
    config: IngestConfig, path: str, *, run_dir: str, columns: Mapping[str, str] | None = None
) -> Artifact:
    """New documents as the last run in `run_dir` made its own; `columns` maps our names to the file's."""
    from scalingnote.ingest import job  # late, as above

    made_by = load_run(run_dir)
    if made_by.cross_encoder is not None and made_by.distill is not None and not made_by.distill.document:
        raise ConfigError("this run's documents were read by a cross-encoder: encode them anew instead")
    own = "encode_student" in [stage.name for stage in stages(made_by)]
    new = job.described(path, dict(columns or {}), like=locate(made_by, "dataset"))
    return job.run(
        config,
        new,
        towers=locate(made_by, "student" if own else "dual_encoder"),
        semantic_ids=locate(made_by, "semantic_ids"),
        embeddings=locate(made_by, "embeddings"),
        output=job.place(run_dir, new),
    )


def experiment(config: ExperimentConfig) -> Artifact:
    """The report on an experiment with the last run in its `run_dir`, from access logs."""
    from scalingnote.experiment import job  # late, as above

    dataset = locate(load_run(config.run_dir), "dataset")
    return job.run(config, dataset=dataset.uri, output=fs.join(config.run_dir, "experiment"))


def ladder(config: RunConfig) -> Artifact:
    """Stage I at every model and data size of `config.ladder`, and the laws fitted to what it gave.

    Finished rungs are not trained again. ConfigError before any is, where one cannot be.
    """
    from scalingnote.scaling import job  # late, as above
    from scalingnote.scaling.ladder import rungs

    if config.cross_encoder is not None or config.rounds > 1:
        raise ConfigError("a ladder is of one round of stage I: leave cross_encoder and rounds out")
    run(config, select(config, until="collect"), record=False)
    rows = locate(config, "triplets").counts["train"]
    trained = []
    sized = [
        config.model_copy(update={"train": train}) for train in rungs(config.ladder, config.train, rows=rows)
    ]
    for number, one in enumerate(sized, 1):
        log.info("rung %d/%d", number, len(sized))
        trained.append(run(one, select(one, only="train"), record=False)["dual_encoder"])
    return job.run(config.ladder, trained, output=fs.join(config.run_dir, "ladder"))


def publish(report: Artifact, run_dir: str) -> None:
    """Copy a report to the top of the run directory, where people look for it."""
    for name in report.names("report."):
        fs.write_bytes(fs.join(run_dir, name), fs.read_bytes(report.file(name)))


def _newest(config: RunConfig, kind: str, built: Sequence[Stage], opened: dict[str, Artifact]) -> Artifact:
    """What the last of the stages `built` that builds `kind` left behind.

    `opened` remembers artifacts by stage: those of many stages have the same ancestors.
    """
    stage = next((stage for stage in reversed(built) if stage.builds == kind), None)
    if stage is None:
        raise ArtifactError(f"this run builds no {kind}: its stages are {', '.join(s.name for s in built)}")
    if stage.name not in opened:
        _, uri = _place(config, stage, opened)
        if not _finished(uri):
            raise ArtifactError(
                f"no {kind} for this config in {config.run_dir}: run stage {stage.name!r} first"
            )
        opened[stage.name] = open_artifact(uri, kind=kind)
    return opened[stage.name]


def _place(config: RunConfig, stage: Stage, opened: dict[str, Artifact]) -> tuple[dict[str, Artifact], str]:
    """Parents (finished, by kind) and URI of a stage's artifact."""
    order = stages(config)
    before = order[: order.index(stage)]
    parents = {kind: _newest(config, kind, before, opened) for kind in stage.reads}
    for name, builder in stage.by_stage:
        until = next(number for number, found in enumerate(before) if found.name == builder)
        parents[name] = _newest(config, before[until].builds, before[: until + 1], opened)
    mark = fingerprint(stage.builds, getattr(config, stage.section), parents)
    # A round's artifact lies beside its stage's others: one round is the first of two.
    folder = stage.name.partition("@")[0]
    return parents, fs.absolute(fs.join(config.run_dir, folder, mark[:12]))


def _finished(uri: str) -> bool:
    return fs.exists(fs.join(uri, MANIFEST))
