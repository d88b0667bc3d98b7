"""Migration of a run to another model: the new tower and index are built while the old ones are served.

    run.yaml ─► before ─┐
    --to ─────► after ──┴─► plan ─► stages that `before` has not run ─► comparison ─► migration.yaml

Both configs have the same run directory and the same documents. The place of an artifact depends only on its
settings and inputs. So artifacts that do not depend on the model are reused, and artifacts that a killed run
has finished are not built again. The served run is the last one in run.yaml, so nothing changes for searches
before the cut-over to the new pair (:mod:`scalingnote.serve.cut_over`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field

from scalingnote.core.config import Config, dump, load, validate
from scalingnote.core.errors import ConfigError
from scalingnote.core.model_files import PACKAGE_PREFIX, local_folder
from scalingnote.core.reports import ReportTable
from scalingnote.models import flops, published_model
from scalingnote.models.config import Pretrained, Scratch
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact

if TYPE_CHECKING:
    from scalingnote.evaluate.pair_comparison import SearchedPair

MIGRATION_FILE = "migration.yaml"
SHARED_SECTIONS = ("run_dir", "address", "nodes_wait_s", "dataset", "serve")
# Stages with a time that depends on the size of the model and the lengths of the texts.
ENCODING_STAGES = ("encode", "teacher", "encode_student")
# Settings of an adopted model that limit how much of a text it reads; the others describe its files.
KEPT_OF_ADOPT = ("query_max_length", "document_max_length")


class Migration(Config):
    """Contents of ``migration.yaml`` in a run directory: configs of the served model and of the new one."""

    before: RunConfig = Field(description="config of the run that is served")
    after: RunConfig = Field(description="config of the run that takes its place")
    comparison: str | None = Field(None, description="URI of the comparison of both; null: not compared yet")

    @property
    def run_dir(self) -> str:
        """Directory of both runs."""
        return self.before.run_dir


def begin(run_dir: str, to: str, overrides: Sequence[str] = ()) -> Migration:
    """Prepare the migration of the last run in a directory to another model, without building or writing.

    Args:
        run_dir: directory of a run with an index.
        to: hub id, folder or package:NAME of a published model, which replaces the model of the run; or a
            YAML file (FILE.yaml:VARIANT) with the config of a complete run, except for SHARED_SECTIONS.
        overrides: settings of the new run, ``a.b=value``.

    Raises:
        ConfigError: there is no run or no such model, the new config has other documents or the same model,
            or the index takes writes and does not keep the documents uncut.
        ArtifactError: the run has no index.
    """
    before = pipeline.load_run(run_dir)
    after = _after(before, to, overrides)
    if after.dataset != before.dataset:
        raise ConfigError(
            f"{to} has other documents than the run in {run_dir}: leave its section dataset out, or start "
            "a separate run"
        )
    if before.serve.live != after.serve.live:
        raise ConfigError(
            f"serve.live differs in {to}: leave it out, because both models take the same writes"
        )
    if before.serve.live is not None and not before.serve.live.keep_documents:
        raise ConfigError(
            "serve.live takes writes that the data set does not hold, and keeps no uncut documents to encode "
            "again: set its delta and keep_documents before the first write; or add these documents to the "
            "files of the data set and run again, without serve.live"
        )
    if after == before:
        raise ConfigError(f"the run in {run_dir} uses {to} already: there is nothing to migrate")
    pipeline.locate(before, "index")
    return Migration(before=before, after=after)


def read(run_dir: str) -> Migration:
    """Read the migration of a run directory; raise ConfigError if there is none."""
    path = fs.join(run_dir, MIGRATION_FILE)
    if (text := fs.read_if_exists(path)) is None:
        raise ConfigError(
            f"no other model was compared in {run_dir}: run `scalingnote migrate --run {run_dir} --to MODEL`"
        )
    migration = validate(Migration, yaml.safe_load(text), source=path)
    configs = {
        name: getattr(migration, name).model_copy(update={"run_dir": run_dir}) for name in ("before", "after")
    }
    return migration.model_copy(update=configs)


def build(migration: Migration) -> None:
    """Run the stages of the new model up to its index; keep finished ones, resume killed ones."""
    after = migration.after
    _write(migration)  # replaces an earlier migration, which can no longer be served
    pipeline.run(after, stages.select(after, until="index"), record=False)


def compare(migration: Migration) -> Artifact:
    """Compare both pairs on queries, and record the comparison in ``migration.yaml``.

    The queries are those of the access logs (`serve.access_log`), else the test queries of the data set, else
    pseudo-queries that no student has learnt from.

    Raises:
        ArtifactError: the new index is not built.
        DataError: there are no queries.
    """
    from scalingnote.evaluate import pair_comparison  # late: a plan needs neither torch nor faiss

    before, after = _pair(migration.before), _pair(migration.after)
    dataset = pipeline.locate(migration.before, "dataset")
    source, queries = _queries(migration.after)
    place = fs.join(migration.run_dir, "migrate")
    comparison = pair_comparison.compare(before, after, queries, source=source, dataset=dataset, output=place)
    _write(migration.model_copy(update={"comparison": comparison.uri}))
    return comparison


def _write(migration: Migration) -> None:
    fs.write_bytes(fs.join(migration.run_dir, MIGRATION_FILE), yaml.safe_dump(dump(migration)).encode())


# --- the new config ---------------------------------------------------------------------------------------


def _after(before: RunConfig, to: str, overrides: Sequence[str]) -> RunConfig:
    values = dump(before)
    if to.partition(":")[0].endswith((".yaml", ".yml")):
        shared = {name: values[name] for name in SHARED_SECTIONS}
        after = load(RunConfig, [to], overrides, base=shared)
        return after.model_copy(update={"run_dir": before.run_dir})
    if Path(to).is_dir() or to.startswith(PACKAGE_PREFIX):  # otherwise the stage adopt downloads it
        published_model.read(local_folder(to), "document")
    lengths = {name: values["adopt"][name] for name in KEPT_OF_ADOPT} if values["adopt"] else {}
    values |= {"adopt": {"path": to} | lengths, "rounds": 1}
    values |= dict.fromkeys(("endpoint", "vectors", "cross_encoder"))
    values["evaluate"]["names"].pop("dual_encoder")  # the name of the old model
    return load(RunConfig, [], overrides, base=values)


# --- the plan ---------------------------------------------------------------------------------------------


def plan(migration: Migration) -> ReportTable:
    """Estimate the work for the new model: stages, documents, tokens, time and bytes.

    A stage takes the time of the old run. The time of encoding is scaled by the FLOPs of the models for a
    text, the size of files by the lengths of the embeddings.
    """
    before, after = (pipeline.find_finished(config) for config in (migration.before, migration.after))
    names = [stage.name for stage in stages.select(migration.after, until="index")]
    missing = [name for name in names if name not in after]
    embeddings = pipeline.locate(migration.before, "embeddings")
    documents = embeddings.counts["documents"]
    tokens = int(embeddings.manifest.info.get("encoding", {}).get("tokens", 0))
    old, new = (_document_shape(config) for config in (migration.before, migration.after))
    slower = wider = None  # factors; None: the FLOPs of a model are not known
    if old is not None and new is not None:
        tokens_per_text = tokens / max(documents, 1)
        slower = flops.forward(new, tokens=tokens_per_text) / max(
            flops.forward(old, tokens=tokens_per_text), 1.0
        )
        wider = new.hidden / old.hidden
    seconds = _seconds(missing, before, slower)
    artifacts = [before[name] for name in ("encode", "index") if name in missing and name in before]
    size = sum(part.bytes for artifact in artifacts for part in artifact.manifest.parts.values())
    rows = [
        ["documents", f"{documents:,}"],
        ["their tokens, by the old model", f"{tokens:,}" if tokens else "not known"],
        ["finished stages", ", ".join(name for name in names if name in after) or "none"],
        ["stages to run", ", ".join(missing) or "none"],
        ["time on the same machines, about", "not known" if seconds is None else _duration(seconds)],
        ["new files, about", "not known" if wider is None else f"{size * wider / 1e6:,.1f} MB"],
    ]
    return ReportTable(["migration", f"to {model_name(migration.after)}"], rows)


def _seconds(missing: Sequence[str], before: dict[str, Artifact], slower: float | None) -> float | None:
    """Estimate the seconds of missing stages; None if one is new, or if the FLOPs of a model are not known.

    `adopt`, which copies a model, counts only if the old run had it.
    """
    if any(name not in before and name != "adopt" for name in missing):
        return None
    seconds_before = {
        name: float(before[name].manifest.info["seconds"]) for name in missing if name in before
    }
    encoding = sum(seconds for name, seconds in seconds_before.items() if name in ENCODING_STAGES)
    if encoding and slower is None:
        return None
    return sum(seconds_before.values()) - encoding + encoding * (slower or 0.0)


def _document_shape(config: RunConfig) -> flops.Shape | None:
    """Return the shape of the model that reads documents; None if only the model itself has it."""
    backbone: Pretrained | Scratch
    if config.adopt is not None:
        path = config.adopt.path
        backbone = Pretrained(path=str(local_folder(path)) if path.startswith(PACKAGE_PREFIX) else path)
    elif config.trains_stage_one:
        backbone = config.train.document.backbone
    else:
        return None
    try:
        return flops.backbone_shape(backbone)
    except ConfigError:
        return None


def _duration(seconds: float) -> str:
    hours, minutes = int(seconds // 3600), int(seconds // 60 % 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {seconds % 60:.0f} s"


# --- the comparison ---------------------------------------------------------------------------------------


def model_name(config: RunConfig) -> str:
    """Describe the model of a run, and its student if there is one."""
    if config.adopt is not None:
        teacher = config.adopt.path
    elif config.endpoint is not None:
        teacher = config.endpoint.model
    else:
        teacher = "trained towers" if config.cross_encoder is None else "trained cross-encoder"
    if config.distill is None:
        return teacher
    student: Any = config.distill.student
    return f"{teacher}, queries by a {getattr(student, 'kind', 'transformer')} student"


def _pair(config: RunConfig) -> "SearchedPair":
    from scalingnote.evaluate.pair_comparison import SearchedPair

    return SearchedPair(
        model=model_name(config),
        tower=pipeline.locate(config, config.query_tower_kind),
        index=pipeline.locate(config, "index"),
        embeddings=pipeline.locate(config, "embeddings"),
        terms=pipeline.query_terms(config),
        mapped=config.serve.mapped,
    )


def _queries(config: RunConfig) -> tuple[str, list[str]]:
    """Return the source of the queries to compare on, and the queries."""
    from scalingnote.datasets import splits
    from scalingnote.evaluate import pair_comparison

    if (logs := config.serve.access_log) is not None:
        return f"the access log in {logs}", pair_comparison.log_queries(logs)
    dataset = pipeline.locate(config, "dataset")
    queries = splits.queries(dataset, "test").sort_by("query_id")["query"].to_pylist()
    if queries or config.pseudo_queries is None:
        return "the test split", queries[: pair_comparison.MAX_COMPARED_QUERIES]
    pseudo_queries = (
        pipeline.locate(config, "pseudo_queries").table("queries", ["query", "split"]).to_pylist()
    )
    held_out = [row["query"] for row in pseudo_queries if row["split"] != "train"]
    return "the held-out pseudo-queries", held_out[: pair_comparison.MAX_COMPARED_QUERIES]
