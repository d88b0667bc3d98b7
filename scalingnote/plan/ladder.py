"""A ladder: stage I at several model and data sizes, and the scaling laws fitted to its runs.

    LadderConfig ─rung_configs─► configs ─(pipeline)─► dual encoders ─build─► table, laws, report, plots

Every rung sees each of its pairs once, like the paper's runs. Rows are shuffled in one order, so the pairs
of a smaller rung are among those of a larger one.
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
from scalingnote.core.reports import ReportPage, ReportSection, ReportTable, render
from scalingnote.models.config import TowerConfig
from scalingnote.models.flops import backbone_shape
from scalingnote.plan import laws, training_cost
from scalingnote.plan.config import LadderConfig
from scalingnote.plan.laws import BudgetSplit, Fit, Kind
from scalingnote.plan.training_cost import TowerInput
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft, fingerprint
from scalingnote.train.config import TrainConfig

log = get_logger("ladder")
LAWS = {
    "size": "L(N) = (C/N)^α + δ, at the most data",
    "data": "L(D) = (C/D)^α + δ, at the largest model",
    "joint": "L(N, D) = [(A/N)^(α/β) + B/D]^β + δ",
}


def rung_configs(config: LadderConfig, train: TrainConfig, *, rows: int) -> list[TrainConfig]:
    """Stage I's config of every run, the smallest model first, made from the one that all share.

    Raises:
        ConfigError: a run asks for more pairs than there are `rows` or fewer than a batch, two runs have
            equally many batches, a tower is no transformer, validation is missing,
            or it may stop a run before its last pair.
    """
    transformers = isinstance(train.query, TowerConfig) and isinstance(train.document, TowerConfig)
    for refused, what in (
        (train.validation is None, "measures on validation queries: leave train.validation in"),
        (
            train.validation is not None and train.validation.patience is not None,
            "shows every run all of its pairs: leave out train.validation.patience",
        ),
        (not transformers, "grows transformers: set train.query and train.document to kind transformer"),
    ):
        if refused:
            raise ConfigError(f"a ladder {what}")
    per_epoch, batch = rows // train.global_batch, train.global_batch
    runs: dict[int, int] = {}  # steps -> pairs
    for pairs in config.pairs:
        if not batch <= pairs <= per_epoch * batch:
            raise ConfigError(
                f"ladder.pairs holds {pairs:,}: of {rows:,} pairs in batches of {batch}, a run can see "
                f"{batch} to {per_epoch * batch:,} once; collect more, or lower it"
            )
        same = runs.setdefault(pairs // batch, pairs)
        if same != pairs:
            raise ConfigError(
                f"ladder.pairs holds {same:,}, {pairs:,}: in batches of {batch} they are one run of "
                f"{pairs // batch} steps; leave one"
            )
    narrowest = min(backbone_shape(backbone).hidden for backbone in config.backbones)
    made = []
    for backbone, pairs, seed in product(config.backbones, sorted(config.pairs), config.seeds):
        towers = {
            name: getattr(train, name).model_copy(update={"backbone": backbone})
            for name in ("query", "document")
        }
        slower = (narrowest / backbone_shape(backbone).hidden) ** config.lr_by_width
        optimizer = train.optimizer.model_copy(update={"peak_lr": train.optimizer.peak_lr * slower})
        run = {"epochs": pairs // batch / per_epoch, "seed": seed, "optimizer": optimizer}
        made.append(train.model_copy(update=towers | run))
    return sorted(made, key=lambda one: backbone_shape(one.document.backbone).non_embedding_parameters)


def build(config: LadderConfig, trained: Sequence[Artifact], *, output: str) -> Artifact:
    """Build the `ladder` artifact below the folder `output`, named by config and rungs."""
    parents = {f"rung_{number:03d}": artifact for number, artifact in enumerate(trained)}
    place = fs.absolute(fs.join(output, fingerprint("ladder", config, parents)[:12]))
    draft = Draft(place, kind="ladder", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    table = rung_table([rung_row(artifact) for artifact in trained])
    fits = fit_laws(table)
    report = law_report(table, fits, config=config) | {"environment": environment()}
    draft.write_table("ladder.parquet", table)
    draft.write_json("report.json", report)
    draft.write_bytes("report.md", render("report.md", page=report_page(table, report)).encode())
    for kind, law in fits.items():
        picture = BytesIO()
        laws.draw(law, picture)
        draft.write_bytes(f"{kind}.png", picture.getvalue())
    log.info("%d rungs, %d laws: %s", len(table), len(fits), fs.join(place, "report.md"))
    return draft.commit(counts={"rungs": len(table), "laws": len(fits)})


def rung_row(trained: Artifact) -> dict[str, Any]:
    """The row of a trained dual encoder in the ladder's table.

    Raises:
        ArtifactError: it was trained before the documents of a pair were counted.
    """
    config, counts = validate(TrainConfig, trained.manifest.config, source=trained.uri), trained.counts
    assert isinstance(config.query, TowerConfig)  # rung_configs() refuses others
    if "documents_per_pair" not in counts:
        raise ArtifactError(
            f"{trained.uri} was trained by an earlier version, which did not count the documents of a pair: "
            "delete it and train it again"
        )
    pairs, documents = counts["pairs"], counts["documents_per_pair"]
    shape = backbone_shape(config.document.backbone)
    query = TowerInput(
        backbone_shape(config.query.backbone), counts["query_tokens"] / pairs, lora=config.query.lora
    )
    document = TowerInput(
        shape,
        counts["document_tokens"] / pairs / documents,
        rows=documents,
        pooled=len(trained.read_json("document/tower.json")["views"]),
        lora=config.document.lora,
    )
    work = training_cost.pair_work(query, document, dim=config.dim)
    return {
        "parameters": shape.non_embedding_parameters,
        "examples": pairs,
        "tokens": counts["query_tokens"] + counts["document_tokens"],
        "contrastive_entropy": trained.read_json("validation.json")[-1]["contrastive_entropy"],
        "seed": config.seed,
        "operations": pairs * work.total,
        "seconds": trained.manifest.info["seconds"],
        "artifact": trained.uri,
    }


def fit_laws(table: pa.Table) -> dict[Kind, Fit]:
    """The laws that the table has enough sizes for: of model size at the most data, of data at the largest
    model, and of both."""
    largest = {name: pc.max(table[name]) for name in ("parameters", "examples")}
    parts: dict[Kind, pa.Table] = {
        "size": table.filter(pc.equal(table["examples"], largest["examples"])),
        "data": table.filter(pc.equal(table["parameters"], largest["parameters"])),
        "joint": table,
    }
    fits: dict[Kind, Fit] = {}
    for kind, part in parts.items():
        runs = laws.read_runs(part)
        with suppress(DataError):  # too few sizes; the report says so
            fits[kind] = laws.fit(kind, runs, draws=laws.DRAWS)
    return fits


def law_report(table: pa.Table, fits: Mapping[Kind, Fit], *, config: LadderConfig) -> dict[str, Any]:
    """The fitted laws as JSON values: constants with intervals, R², predictions and best splits of
    budgets."""
    splits = []
    if "joint" in fits:
        largest = table.sort_by("operations").to_pylist()[-1]
        per_parameter = largest["operations"] / (largest["parameters"] * largest["examples"])
        for times in config.budgets:
            budget = times * largest["operations"]
            best = fits["joint"].split(budget, per_parameter=per_parameter)
            splits.append({"operations": budget, **{name: [*found] for name, found in best.items()}})
    return {
        "level": laws.LEVEL,
        "laws": {
            kind: {
                "runs": len(law.runs),
                "sizes": law.sizes,
                "degrees_of_freedom": law.freedom,
                "r2": law.r2,
                "scatter": law.scatter,
                "seed_scatter": law.seed_scatter,
                "constants": {name: [*found] for name, found in law.constants().items()},
            }
            for kind, law in fits.items()
        },
        "predictions": [
            {"parameters": n, "data": d, "entropy": _predict(fits, n, d)} for n, d in config.predict
        ],
        "splits": splits,
    }


def _predict(fits: Mapping[Kind, Fit], parameters: float, data: float) -> dict[Kind, list[float]]:
    """Entropy by each law; a law of one size applies only at the other size its runs share."""
    applies = {
        kind: {"size": law.runs.data == data, "data": law.runs.parameters == parameters}.get(kind)
        for kind, law in fits.items()
    }
    return {
        kind: [*fits[kind].predict(parameters=parameters, data=data)]
        for kind, runs in applies.items()
        if runs is None or runs.all()
    }


def rung_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of :func:`rung_row` as a table, the smallest model first."""
    more = {"seed": pa.int64(), "operations": pa.float64(), "seconds": pa.float64(), "artifact": pa.string()}
    columns = pa.schema([*schema.LADDER, *(pa.field(name, kind) for name, kind in more.items())])
    return pa.Table.from_pylist(rows, schema=columns).sort_by(
        [("parameters", "ascending"), ("examples", "ascending")]
    )


def report_page(table: pa.Table, report: dict[str, Any]) -> ReportPage:
    """The ladder's report: rungs, constants of laws, predictions and best splits of budgets."""
    names = ("parameters", "examples", "contrastive_entropy", "seed", "operations")
    rungs = [[f"{run[name]:.6g}" for name in names] for run in table.to_pylist()]
    constants = [
        [kind, name, *_numbers(values)]
        for kind, law in report["laws"].items()
        for name, values in law["constants"].items()
    ]
    predictions = [
        [f"{point['parameters']:.4g}", f"{point['data']:.4g}", kind, *_numbers(values)]
        for point in report["predictions"]
        for kind, values in (point["entropy"] or {"none applies": ()}).items()
    ]
    splits = [
        [f"{split['operations']:.3g}", name, *_numbers(split[name])]
        for split in report["splits"]
        for name in BudgetSplit._fields
    ]
    interval = [f"{report['level']:.0%} from", "to"]
    tables = {
        "Rungs": ReportTable(names, rungs),
        "Constants": ReportTable(["law", "constant", "value", *interval], constants),
        "Predictions": ReportTable(["parameters", "pairs", "law", "entropy", *interval], predictions),
        "Best splits of a budget": ReportTable(["operations", "of", "best", *interval], splits),
    }
    notes = [_quality(kind, law) for kind, law in report["laws"].items()]
    if len(notes) < len(LAWS):
        notes.append(
            "A law that is missing here needs more sizes: four for one of N or D, three of each for both."
        )
    sections = [ReportSection(title, tables=[one]) for title, one in tables.items() if one.rows]
    return ReportPage("Ladder", sections, notes=notes)


def _quality(kind: str, law: dict[str, Any]) -> str:
    seeds = law["seed_scatter"]
    return (
        f"{LAWS[kind]}: {law['runs']} runs of {law['sizes']} sizes, R² = {law['r2']:.4f}, "
        f"degrees of freedom: {law['degrees_of_freedom']}, scatter of a run {law['scatter']:.3f}"
        + ("" if seeds is None else f", between seeds of a size {seeds:.3f}")
    )


def _numbers(values: Sequence[float]) -> list[str]:
    """A value and the ends of its interval; three empty cells for none."""
    return [f"{value:.4g}" for value in values] or [""] * 3
