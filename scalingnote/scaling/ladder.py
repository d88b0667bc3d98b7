"""A ladder: stage I at several model and data sizes, and the scaling laws fitted to its runs.

    LadderConfig ─rung_configs─► configs ─(pipeline)─► dual encoders ─build─► table, laws, report, plots

Every rung sees each of its pairs once, like the paper's runs. Rows are shuffled in one order, so the pairs
of a smaller rung are among those of a larger one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import product
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote import reports
from scalingnote.config import validate
from scalingnote.errors import ArtifactError, ConfigError, DataError
from scalingnote.log import environment, get_logger
from scalingnote.models.config import TowerConfig
from scalingnote.models.flops import backbone_shape
from scalingnote.scaling import laws, training_cost
from scalingnote.scaling.config import LadderConfig
from scalingnote.scaling.laws import Fit, Kind
from scalingnote.scaling.training_cost import TowerInput
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
            equally many batches, pairs would be repeated, a tower is no transformer, validation is missing,
            or it may stop a run before its last pair.
    """
    if train.validation is None:
        raise ConfigError("a ladder measures on validation queries: leave train.validation in")
    if train.validation.patience is not None:
        raise ConfigError(
            "every run of a ladder sees all of its pairs: leave out train.validation.patience, "
            f"found {train.validation.patience}"
        )
    if train.batching.ratios:
        raise ConfigError(
            "every run of a ladder sees each of its pairs once, and train.batching.ratios draws some of them "
            "again: leave it out"
        )
    if not (isinstance(train.query, TowerConfig) and isinstance(train.document, TowerConfig)):
        raise ConfigError(
            "a ladder grows transformers: set train.query and train.document to kind transformer"
        )
    per_epoch, batch = rows // train.global_batch, train.global_batch
    for pairs in config.pairs:
        if not batch <= pairs <= per_epoch * batch:
            raise ConfigError(
                f"ladder.pairs holds {pairs:,}: of {rows:,} pairs in batches of {batch}, a run can see "
                f"{batch} to {per_epoch * batch:,} once; collect more, or lower it"
            )
    ((steps, times),) = Counter(pairs // batch for pairs in config.pairs).most_common(1)
    if times > 1:
        same = ", ".join(f"{pairs:,}" for pairs in config.pairs if pairs // batch == steps)
        raise ConfigError(
            f"ladder.pairs holds {same}: in batches of {batch} they are one run of {steps} steps, and would "
            f"count as {times}; leave one"
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
    fits = fit_laws(table, config=config)
    report = law_report(table, fits, config=config) | {"environment": environment()}
    draft.write_table("ladder.parquet", table)
    draft.write_json("report.json", report)
    draft.write_bytes("report.md", markdown(table, report).encode())
    for kind, law in fits.items():
        picture = BytesIO()
        laws.draw(law, picture, level=config.level)
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


def fit_laws(table: pa.Table, *, config: LadderConfig) -> dict[Kind, Fit]:
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
            fits[kind] = laws.fit(kind, runs, draws=config.draws)
    return fits


def law_report(table: pa.Table, fits: Mapping[Kind, Fit], *, config: LadderConfig) -> dict[str, Any]:
    """The fitted laws as JSON values: constants with intervals, R², predictions and best splits of
    budgets."""
    report: dict[str, Any] = {"level": config.level, "laws": {}}
    for kind, law in fits.items():
        report["laws"][kind] = {
            "runs": len(law.runs),
            "sizes": law.sizes,
            "degrees_of_freedom": law.freedom,
            "r2": law.r2,
            "scatter": law.scatter,
            "seed_scatter": law.seed_scatter,
            "constants": {name: [*found] for name, found in law.constants(level=config.level).items()},
        }
    report["predictions"] = [
        {"parameters": n, "data": d, "entropy": _predicted(fits, n, d, level=config.level)}
        for n, d in config.predict
    ]
    report["splits"] = _splits(table, fits["joint"], config) if "joint" in fits else []
    return report


def rung_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of :func:`rung_row` as a table, the smallest model first."""
    more = {"seed": pa.int64(), "operations": pa.float64(), "seconds": pa.float64(), "artifact": pa.string()}
    columns = pa.schema([*schema.LADDER, *(pa.field(name, kind) for name, kind in more.items())])
    return pa.Table.from_pylist(rows, schema=columns).sort_by(
        [("parameters", "ascending"), ("examples", "ascending")]
    )


def _predicted(
    fits: Mapping[Kind, Fit], parameters: float, data: float, *, level: float
) -> dict[Kind, list[float]]:
    """Entropy by each law; a law of one size applies only at the other size its runs share."""
    report: dict[Kind, list[float]] = {}
    for kind, law in fits.items():
        applies = {"size": law.runs.data == data, "data": law.runs.parameters == parameters}
        if kind == "joint" or applies[kind].all():
            report[kind] = [*law.predict(parameters=parameters, data=data, level=level)]
    return report


def _splits(table: pa.Table, law: Fit, config: LadderConfig) -> list[dict[str, Any]]:
    largest = table.sort_by("operations").to_pylist()[-1]
    per_parameter = largest["operations"] / (largest["parameters"] * largest["examples"])
    splits = []
    for times in config.budgets:
        budget = times * largest["operations"]
        best = law.split(budget, per_parameter=per_parameter, level=config.level)
        splits.append({"operations": budget, **{name: [*found] for name, found in best.items()}})
    return splits


def markdown(table: pa.Table, report: dict[str, Any]) -> str:
    """The ladder's report as Markdown: rungs, laws, predictions and best splits of budgets."""
    header = ["parameters", "pairs", "contrastive entropy", "between seeds", "seeds", "operations"]
    parts = ["# Ladder", reports.markdown(header, _rung_rows(table), text=0)]
    level = f"{report['level']:.0%}"
    for kind, law in report["laws"].items():
        lines = [[name, *(f"{v:.4g}" for v in values)] for name, values in law["constants"].items()]
        free, between = law["degrees_of_freedom"], law["seed_scatter"]
        quality = (
            f"{law['runs']} runs of {law['sizes']} sizes, R² = {law['r2']:.4f} with {free} "
            f"degree{'s' * (free != 1)} of freedom, scatter of a run {law['scatter']:.3f}"
            + ("." if between is None else f", between seeds of a size {between:.3f}.")
        )
        parts += [
            f"## {LAWS[kind]}",
            quality,
            reports.markdown(["constant", "value", f"{level} from", "to"], lines),
        ]
    if report["predictions"]:
        header = ["parameters", "pairs", "law", "entropy", f"{level} from", "to"]
        rows = [row for point in report["predictions"] for row in _prediction_rows(point)]
        parts += [
            "## Predictions for models that were not trained",
            "Intervals are the curve's: a single run scatters around it.",
            reports.markdown(header, rows, text=0),
        ]
    if report["splits"]:
        header = ["operations", "parameters", level, "pairs", level, "entropy", level]
        parts += [
            "## Best splits of a budget",
            reports.markdown(header, [_split(split) for split in report["splits"]], text=0),
        ]
    if len(report["laws"]) < len(LAWS):
        parts.append(
            "A law that is missing here needs more sizes: four for one of N or D, three of each for both."
        )
    return "\n\n".join(parts) + "\n"


def _rung_rows(table: pa.Table) -> list[list[str]]:
    """A row per size: the mean entropy of its seeds, and their standard deviation."""
    sizes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for run in table.to_pylist():
        sizes.setdefault((run["parameters"], run["examples"]), []).append(run)
    rows = []
    for (parameters, pairs), runs in sizes.items():
        entropies = [run["contrastive_entropy"] for run in runs]
        between = f"{stdev(entropies):.4f}" if len(runs) > 1 else "–"
        shown = [f"{fmean(entropies):.4f}", between, str(len(runs)), f"{runs[0]['operations']:.2g}"]
        rows.append([f"{parameters:,}", f"{pairs:,}", *shown])
    return rows


def _prediction_rows(point: dict[str, Any]) -> list[list[str]]:
    """A row per law that applies, or one row that says that none does."""
    size = [f"{point['parameters']:.4g}", f"{point['data']:.4g}"]
    rows = [[*size, kind, *(f"{v:.4g}" for v in values)] for kind, values in point["entropy"].items()]
    return rows or [[*size, "none applies", "", "", ""]]


def _split(split: dict[str, Any]) -> list[str]:
    cells = [f"{split['operations']:.3g}"]
    for name in ("parameters", "data", "entropy"):
        value, low, high = split[name]
        cells += [f"{value:.4g}", f"{low:.3g} to {high:.3g}"]
    return cells
