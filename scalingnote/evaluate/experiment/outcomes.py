"""Outcomes of requests: sums and counts of each measure per unit, latencies, user feedback and clicks.

A measure is a mean over requests or documents: its count is their number, and its sum is the sum of their
values. A request that does not count has the value null. A unit with count 0 (a user without rated answers)
is not an observation.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.errors import DataError
from scalingnote.core.log import Progress
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.input_files import Quarantine, UnreadableRow
from scalingnote.datasets.readers import table_rows
from scalingnote.evaluate.experiment.access_log import REQUESTS, read_requests, select_requests
from scalingnote.evaluate.experiment.config import ExperimentConfig

KEYS = ["arm", "unit"]
PAIR = ["query", "doc_id"]
FEW_RESULTS = 5  # an answer with fewer documents counts as too short
DEPTHS = (4, 20)  # depths at which the share of irrelevant documents is measured
MEASURES = (  # in the order of reports
    *(f"irrelevant@{depth}" for depth in DEPTHS),
    "satisfaction",
    f"fewer_than_{FEW_RESULTS}",
    "click_through",
    "latency_ms",
    "partial",
    "errors",
)
MAX_PARTIAL_SUMS = 64  # number of batches whose sums are in memory before they are added
REQUEST_SAMPLE = pa.schema(
    [*(REQUESTS.field(name) for name in ("request_id", *KEYS, "query", "doc_ids")), ("drawn", pa.float64())]
)
SHOWN = pa.schema({**dict.fromkeys([*KEYS, *PAIR], pa.string()), "rank": pa.int64()})


class Outcomes(NamedTuple):
    """Outcomes of the requests of an experiment."""

    requests: pa.Table  # `arm`, `time` and `latency_ms` of each
    units: pa.Table  # result of :func:`add_sums`
    sample: pa.Table  # REQUEST_SAMPLE


def read_outcomes(config: ExperimentConfig, logs: Sequence[str], quarantine: Quarantine) -> Outcomes:
    """Read the outcomes of an experiment in one pass over its logs.

    Args:
        config: of the experiment.
        logs: access logs.
        quarantine: for lines and rows that cannot be used; it counts requests that are left out.

    Raises:
        DataError: the logs have no request of the experiment, or the files of feedback or clicks are invalid.
    """
    signals = {}
    if config.feedback is not None:
        signals["satisfaction"] = read_signals(config.feedback, quarantine, column="satisfied")
    if config.clicks is not None:
        signals["click_through"] = read_signals(config.clicks, quarantine)
    per_arm = config.relevance.requests_per_arm if config.relevance else 0
    requests: list[pa.Table] = []
    sums: list[pa.Table] = []
    sample, rng = REQUEST_SAMPLE.empty_table(), np.random.default_rng(0)
    with Progress("compare", total=len(logs), unit="log files") as progress:
        for uri in logs:
            for batch in read_requests([uri], quarantine):
                selected = select_requests(batch, config, quarantine)
                values = measure_requests(selected, signals)
                requests.append(values.select(["arm", "latency_ms"]).append_column("time", selected["time"]))
                sums.append(sum_by_unit(values))
                if len(sums) == MAX_PARTIAL_SUMS:
                    sums = [add_sums(sums)]
                if per_arm:
                    sample = draw_sample(sample, selected, per_arm=per_arm, rng=rng)
            progress.advance(1)
    if not sum(map(len, requests)):
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in quarantine.left_out.items())
        raise DataError(
            f"no request of experiment {config.split.name!r} in {len(logs)} files (left out: "
            f"{left_out or 'none'}{quarantine.reasons()}): set split, start and end like those of the service"
        )
    return Outcomes(pa.concat_tables(requests), add_sums(sums), sample)


def measure_requests(requests: pa.Table, signals: Mapping[str, Mapping[str, float]]) -> pa.Table:
    """Return `arm`, `unit` and a column per measure for requests of the experiment.

    `signals` has feedback and clicks: measure -> request_id -> value. A request without a click has the value
    0, a request without feedback has none.
    """
    answered = pc.less(requests["status"], 400)
    request_ids = requests["request_id"].to_pylist()
    has_enough_k = pc.greater_equal(pc.fill_null(requests["k"], FEW_RESULTS), FEW_RESULTS)
    results = pc.fill_null(pc.list_value_length(requests["doc_ids"]), 0)
    values = {
        f"fewer_than_{FEW_RESULTS}": pc.if_else(has_enough_k, pc.less(results, FEW_RESULTS), None),
        "latency_ms": requests["total_ms"],
        "partial": pc.less(requests["shards_answered"], requests["shards"]),
    }
    for name, value_of in signals.items():
        default = 0.0 if name == "click_through" else None
        signal_values = [value_of.get(request_id, default) for request_id in request_ids]
        values[name] = pa.array(signal_values, pa.float64())
    columns = {name: pc.if_else(answered, column.cast(pa.float64()), None) for name, column in values.items()}
    columns["errors"] = pc.invert(answered).cast(pa.float64())
    return pa.table({**{key: requests[key] for key in KEYS}, **columns})


def sum_by_unit(values: pa.Table) -> pa.Table:
    """Sum values by arm and unit: ``NAME.sum`` and ``NAME.count`` for each other column NAME."""
    names = [name for name in values.column_names if name not in KEYS]
    aggregations = [(name, kind) for name in names for kind in ("sum", "count")]
    sums = values.group_by(KEYS, use_threads=False).aggregate(aggregations)
    return sums.rename_columns([*KEYS, *(f"{name}.{kind}" for name, kind in aggregations)])


def add_sums(sums: Sequence[pa.Table]) -> pa.Table:
    """Add results of :func:`sum_by_unit`, which may have different measures, by arm and unit."""
    table = pa.concat_tables(sums, promote_options="default")
    names = [name for name in table.column_names if name not in KEYS]
    totals = table.group_by(KEYS, use_threads=False).aggregate([(name, "sum") for name in names])
    return totals.rename_columns([*KEYS, *names])


# --- feedback and clicks -----------------------------------------------------------------------------------


def read_signals(path: str, quarantine: Quarantine, *, column: str | None = None) -> dict[str, float]:
    """Read request_id -> a number from 0 to 1; the last row of a request counts.

    Args:
        path: file or glob of rows with a `request_id`.
        quarantine: for rows that cannot be read, or have no id or no number.
        column: column with the number, or with true and false; None: every row has the value 1.

    Raises:
        DataError: there is no file or no usable row, or a number is not from 0 to 1.
    """
    names = ["request_id", *([column] if column else [])]
    signals: dict[str, float] = {}
    for row in chain.from_iterable(table_rows(TableFile(path=path), names, needs=names)):
        if isinstance(row, UnreadableRow):
            quarantine.reject(path, row.row, row.reason)
        elif any(row.get(name) is None for name in names):
            quarantine.reject(path, row, f"without {' or '.join(names)}")
        else:
            value = row[column] if column else 1.0
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise DataError(f"{path}: {column} is {value!r}: pass true, false or a number from 0 to 1")
            signals[str(row["request_id"])] = float(value)
    if not signals:
        raise DataError(f"{path} has no row with {' and '.join(names)}{quarantine.reasons(of=path)}")
    return signals


# --- judged results ----------------------------------------------------------------------------------------


def draw_sample(sample: pa.Table, requests: pa.Table, *, per_arm: int, rng: np.random.Generator) -> pa.Table:
    """Draw a uniform sample of each arm's answered text queries: those with the smallest numbers `drawn`.

    Args:
        sample: REQUEST_SAMPLE of the earlier requests.
        requests: further requests.
        per_arm: size of the sample.
        rng: the same generator for all requests, so that the sample does not depend on the batches.
    """
    answered = pc.and_(pc.less(requests["status"], 400), pc.is_valid(requests["query"]))
    table = requests.filter(pc.and_(answered, pc.is_valid(requests["doc_ids"])))
    table = table.append_column("drawn", pa.array(rng.random(len(table)))).select(REQUEST_SAMPLE.names)
    candidates = pa.concat_tables([sample, table]).sort_by("drawn")
    arms = (pc.equal(candidates["arm"], arm) for arm in pc.unique(candidates["arm"]).to_pylist())
    of_arms = (candidates.filter(arm).slice(0, per_arm) for arm in arms)
    return pa.concat_tables([REQUEST_SAMPLE.empty_table(), *of_arms]).combine_chunks()


def shown_documents(sample: pa.Table) -> pa.Table:
    """Return results of sampled requests as SHOWN, to the deepest of DEPTHS; ranks start at 0."""
    rows = [
        row | {"doc_id": doc_id, "rank": rank}
        for row in sample.to_pylist()
        for rank, doc_id in enumerate(row["doc_ids"][: max(DEPTHS)])
    ]
    return pa.Table.from_pylist(rows, schema=SHOWN)


def irrelevant_documents(shown: pa.Table, judged: pa.Table, *, below: float) -> pa.Table:
    """Sum the shares of irrelevant documents in the first K of DEPTHS by unit.

    Args:
        shown: results in the form of SHOWN.
        judged: `query`, `doc_id` and `score` of judged pairs; a document without a score does not count.
        below: documents with a lower score are irrelevant.
    """
    rows = shown.join(judged, keys=PAIR, join_type="left outer")
    irrelevant = pc.less(rows["score"], below).cast(pa.float64())
    columns = {
        f"irrelevant@{depth}": pc.if_else(pc.less(rows["rank"], depth), irrelevant, None) for depth in DEPTHS
    }
    return sum_by_unit(pa.table({**{key: rows[key] for key in KEYS}, **columns}))
