"""A ladder: stage I at several model and data sizes, and the scaling laws fitted to its runs.

    LadderConfig ─rung_configs─► configs ─(pipeline)─► dual encoders ─build─► table, laws, report, plots

Every rung sees each of its pairs once, like the runs of the paper. All rungs shuffle the rows in the same
order, so a larger rung includes the pairs of a smaller one.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.config import validate
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.core.log import environment, get_logger
from scalingnote.core.reports import render
from scalingnote.models import flops
from scalingnote.models.config import TowerConfig
from scalingnote.models.flops import backbone_shape
from scalingnote.plan import laws
from scalingnote.plan.config import LadderConfig
from scalingnote.plan.laws import Fit, Kind
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft, fingerprint
from scalingnote.train.config import TrainConfig

log = get_logger("ladder")
BUDGETS = (1, 10, 100)  # operations to split by the joint law, as multiples of the largest run


def rung_configs(config: LadderConfig, train: TrainConfig, *, rows: int) -> list[TrainConfig]:
    """Build the config of stage I for every run, the smallest model first, from the shared config.

    Equal sizes, and sizes with an equal number of batches, are one run.

    Raises:
        ConfigError: a run needs more pairs than there are `rows` or fewer than a batch, a tower is not a
            transformer, validation is missing, or it may stop a run before its last pair.
    """
    if train.validation is None:
        raise ConfigError("a ladder measures on validation queries: set train.validation")
    if train.validation.patience is not None:
        raise ConfigError(
            "a ladder trains every run on all of its pairs: leave out train.validation.patience"
        )
    if not (isinstance(train.query, TowerConfig) and isinstance(train.document, TowerConfig)):
        raise ConfigError(
            "a ladder needs transformers: set train.query and train.document to kind transformer"
        )
    batch = train.global_batch
    per_epoch = rows // batch
    steps = sorted({pairs // batch for pairs in config.pairs})
    if steps[0] < 1 or steps[-1] > per_epoch:
        raise ConfigError(
            f"ladder.pairs holds {sorted(config.pairs)}: of {rows:,} pairs in batches of {batch}, a run can "
            f"see {batch} to {per_epoch * batch:,} once; collect more, or lower it"
        )
    narrowest = min(backbone_shape(backbone).hidden for backbone in config.backbones)
    configs = []
    backbones, seeds = dict.fromkeys(config.backbones), dict.fromkeys(config.seeds)
    for backbone, count, seed in product(backbones, steps, seeds):
        slower = (narrowest / backbone_shape(backbone).hidden) ** config.lr_by_width
        peak_lr = train.optimizer.peak_lr * slower
        changes = {
            "query": train.query.model_copy(update={"backbone": backbone}),
            "document": train.document.model_copy(update={"backbone": backbone}),
            "optimizer": train.optimizer.model_copy(update={"peak_lr": peak_lr}),
            "epochs": count / per_epoch,
            "seed": seed,
        }
        configs.append(train.model_copy(update=changes))
    return sorted(configs, key=lambda one: backbone_shape(one.document.backbone).non_embedding_parameters)


def build(config: LadderConfig, trained: Sequence[Artifact], *, output: str) -> Artifact:
    """Build the `ladder` artifact below the folder `output`, named by config and rungs."""
    parents = {f"rung_{number:03d}": artifact for number, artifact in enumerate(trained)}
    place = fs.absolute(fs.join(output, fingerprint("ladder", config, parents)[:12]))
    draft = Draft(place, kind="ladder", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    table = rung_table([rung_row(artifact) for artifact in trained])
    fits = fit_laws(table)
    report = law_report(table, fits)
    draft.write_table("ladder.parquet", table)
    draft.write_json("report.json", report | {"environment": environment()})
    draft.write_bytes("report.md", report_text(table, report).encode())
    for kind, law in fits.items():
        picture = BytesIO()
        laws.draw(law, picture)
        draft.write_bytes(f"{kind}.png", picture.getvalue())
    log.info("%d rungs, %d laws: %s", len(table), len(fits), fs.join(place, "report.md"))
    return draft.commit(counts={"rungs": len(table), "laws": len(fits)})


def rung_row(trained: Artifact) -> dict[str, Any]:
    """Build the row of a trained dual encoder in the ladder's table.

    Raises:
        ArtifactError: an earlier version trained it, which did not count the documents of a pair.
    """
    config, counts = validate(TrainConfig, trained.manifest.config, source=trained.uri), trained.counts
    assert isinstance(config.query, TowerConfig)  # rung_configs() refuses others
    if "documents_per_pair" not in counts:
        raise ArtifactError(
            f"{trained.uri} was trained by an earlier version, which did not count the documents of a pair: "
            "delete it and train it again"
        )
    shape, pairs = backbone_shape(config.document.backbone), counts["pairs"]
    documents = pairs * counts["documents_per_pair"]
    query = flops.row(
        backbone_shape(config.query.backbone),
        tokens=counts["query_tokens"] / pairs,
        pooled=1,
        dim=config.dim,
        lora=config.query.lora,
    )
    document = flops.row(
        shape,
        tokens=counts["document_tokens"] / documents,
        pooled=len(trained.read_json("document/tower.json")["views"]),
        dim=config.dim,
        lora=config.document.lora,
    )
    return {
        "parameters": shape.non_embedding_parameters,
        "examples": pairs,
        "tokens": counts["query_tokens"] + counts["document_tokens"],
        "contrastive_entropy": trained.read_json("validation.json")[-1]["contrastive_entropy"],
        "seed": config.seed,
        "operations": pairs * query.total + documents * document.total,
        "seconds": trained.manifest.info["seconds"],
        "artifact": trained.uri,
    }


def rung_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Build the table of rows of :func:`rung_row`, the smallest model first."""
    more = {"seed": pa.int64(), "operations": pa.float64(), "seconds": pa.float64(), "artifact": pa.string()}
    columns = pa.schema([*schema.LADDER, *(pa.field(name, kind) for name, kind in more.items())])
    return pa.Table.from_pylist(rows, schema=columns).sort_by(
        [("parameters", "ascending"), ("examples", "ascending")]
    )


def fit_laws(table: pa.Table) -> dict[Kind, Fit]:
    """Fit the laws that the table has enough sizes for.

    They are the laws of model size at the most data, of data at the largest model, and of both.
    """
    most, largest = pc.max(table["examples"]), pc.max(table["parameters"])
    parts: dict[Kind, pa.Table] = {
        "size": table.filter(pc.equal(table["examples"], most)),
        "data": table.filter(pc.equal(table["parameters"], largest)),
        "joint": table,
    }
    fits: dict[Kind, Fit] = {}
    for kind, part in parts.items():
        runs = laws.read_runs(part)
        with suppress(DataError):  # too few sizes, which the report states
            fits[kind] = laws.fit(kind, runs, draws=laws.DRAWS)
    return fits


def law_report(table: pa.Table, fits: Mapping[Kind, Fit]) -> dict[str, Any]:
    """Convert the fitted laws to JSON values: R², constants with intervals, and best splits of budgets."""
    laws_by_kind = {
        kind: {
            "runs": len(law.runs.entropy),
            "degrees_of_freedom": law.freedom,
            "r2": law.r2,
            "scatter": law.scatter,
            "seed_scatter": law.seed_scatter,
            "constants": {name: [*interval] for name, interval in law.constants().items()},
        }
        for kind, law in fits.items()
    }
    splits = []
    if "joint" in fits:
        largest = table.sort_by("operations").to_pylist()[-1]
        per_parameter = largest["operations"] / (largest["parameters"] * largest["examples"])
        for times in BUDGETS:
            budget = times * largest["operations"]
            best = fits["joint"].split(budget, per_parameter=per_parameter)
            splits.append({"operations": budget, **{name: [*interval] for name, interval in best.items()}})
    return {"level": laws.LEVEL, "laws": laws_by_kind, "splits": splits}


def report_text(table: pa.Table, report: dict[str, Any]) -> str:
    """Format the ladder's report as Markdown: rungs, constants of laws and best splits of budgets."""
    return render("ladder.md", rungs=table.to_pylist(), report=report, needs=laws.NEEDS)
