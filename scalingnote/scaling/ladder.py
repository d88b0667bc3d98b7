"""A ladder: stage I at several model and data sizes, and what its rungs say together.

    LadderConfig ─rungs─► training configs ─(the pipeline trains)─► dual encoders ─row─► table ─laws─► fits

Every rung sees each of its pairs once, as the paper's do, and the pairs of a smaller rung are among those of
a larger one: rows are dealt out in one order.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.config import validate
from scalingnote.errors import ArtifactError, ConfigError, DataError
from scalingnote.models.config import TowerConfig
from scalingnote.models.flops import backbone_shape
from scalingnote.scaling import fit, flops
from scalingnote.scaling.config import LadderConfig
from scalingnote.scaling.fit import Fit, Interval, Kind
from scalingnote.scaling.flops import Side
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact
from scalingnote.train.config import TrainConfig


def rungs(config: LadderConfig, train: TrainConfig, *, rows: int) -> list[TrainConfig]:
    """Stage I's config of every run, the smallest first; `rows` is how many pairs there are.

    ConfigError for what cannot be trained: more pairs than there are, fewer than a batch, as many batches as
    another run has, pairs that are drawn again, no transformers, no validation to measure by, or one that may
    stop a run before it has seen all of its pairs.
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
    return sorted(made, key=_parameters)


def row(trained: Artifact) -> dict[str, Any]:
    """A rung's row of the ladder's table, by the artifact that it left behind.

    ArtifactError when that does not say how many documents a pair has.
    """
    config, counts = validate(TrainConfig, trained.manifest.config, source=trained.uri), trained.counts
    assert isinstance(config.query, TowerConfig)  # rungs() refuses others
    if "documents_per_pair" not in counts:
        raise ArtifactError(
            f"{trained.uri} was trained by an earlier version, which did not count the documents of a pair: "
            "delete it and train it again"
        )
    pairs, documents = counts["pairs"], counts["documents_per_pair"]
    shape = backbone_shape(config.document.backbone)
    query = Side(
        backbone_shape(config.query.backbone), counts["query_tokens"] / pairs, lora=config.query.lora
    )
    document = Side(
        shape,
        counts["document_tokens"] / pairs / documents,
        rows=documents,
        pooled=len(trained.read_json("document/tower.json")["views"]),
        lora=config.document.lora,
    )
    work = flops.of_pair(query, document, dim=config.dim)
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


def laws(table: pa.Table, *, config: LadderConfig) -> dict[Kind, Fit]:
    """The laws that a ladder's table is large enough for: of model size at the most data, of data at the
    largest model, and of both."""
    largest = {name: pc.max(table[name]) for name in ("parameters", "examples")}
    parts: dict[Kind, pa.Table] = {
        "size": table.filter(pc.equal(table["examples"], largest["examples"])),
        "data": table.filter(pc.equal(table["parameters"], largest["parameters"])),
        "joint": table,
    }
    fits: dict[Kind, Fit] = {}
    for kind, part in parts.items():
        runs = fit.read(part)
        with suppress(DataError):  # too few sizes, which the report says
            fits[kind] = fit.fit(kind, runs, draws=config.draws)
    return fits


def report(table: pa.Table, fits: Mapping[Kind, Fit], *, config: LadderConfig) -> dict[str, Any]:
    """What the laws say, as JSON values: constants with intervals, R², what models not run would reach, and
    how budgets are best spent."""
    told: dict[str, Any] = {"level": config.level, "laws": {}}
    for kind, law in fits.items():
        constants = law.constants(level=config.level)
        told["laws"][kind] = {
            "runs": len(law.runs),
            "degrees_of_freedom": law.freedom,
            "r2": law.r2,
            "scatter": law.scatter,
            "constants": {name: _values(interval) for name, interval in constants.items()},
        }
    told["predictions"] = [
        {
            "parameters": parameters,
            "data": data,
            "entropy": _predicted(fits, parameters, data, level=config.level),
        }
        for parameters, data in config.predict
    ]
    told["splits"] = _splits(table, fits["joint"], config) if "joint" in fits else []
    return told


def to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of :func:`row` as a table, the smallest model first."""
    more = {"seed": pa.int64(), "operations": pa.float64(), "seconds": pa.float64(), "artifact": pa.string()}
    columns = pa.schema([*schema.LADDER, *(pa.field(name, kind) for name, kind in more.items())])
    return pa.Table.from_pylist(rows, schema=columns).sort_by(
        [("parameters", "ascending"), ("examples", "ascending")]
    )


def _predicted(
    fits: Mapping[Kind, Fit], parameters: float, data: float, *, level: float
) -> dict[Kind, list[float]]:
    """Entropy by each law; one of one size speaks only of what its runs share."""
    told: dict[Kind, list[float]] = {}
    for kind, law in fits.items():
        held = {"size": law.runs.data == data, "data": law.runs.parameters == parameters}.get(kind)
        if held is None or held.all():
            told[kind] = _values(law.predict(parameters=parameters, data=data, level=level))
    return told


def _splits(table: pa.Table, law: Fit, config: LadderConfig) -> list[dict[str, Any]]:
    largest = table.sort_by("operations").to_pylist()[-1]
    per_parameter = largest["operations"] / (largest["parameters"] * largest["examples"])
    budgets = [times * largest["operations"] for times in config.budgets]
    splits = [law.split(budget, per_parameter=per_parameter, level=config.level) for budget in budgets]
    return [
        {"operations": budget, **{name: _values(interval) for name, interval in split.items()}}
        for budget, split in zip(budgets, splits, strict=True)
    ]


def _values(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


def _parameters(train: TrainConfig) -> int:
    return backbone_shape(train.document.backbone).non_embedding_parameters
