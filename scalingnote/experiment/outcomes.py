"""Outcomes of requests: sums and counts of each measure per unit, latencies, and what users said and clicked.

A measure is a mean over requests or documents: its count is their number, its sum what they add up to. A
unit with count 0 (a user whose answers were never rated) is no observation.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float, Float32
from numpy import ndarray

from scalingnote.datasets.raw_rows import (
    Quarantine,
    Row,
    UnreadableRow,
    csv_rows,
    json_lines,
    match_files,
    parquet_rows,
)
from scalingnote.errors import DataError
from scalingnote.experiment.access_log import REQUESTS, STAGES
from scalingnote.storage.shuffle import hash_of

KEYS = ["arm", "unit"]
PAIR = ["query", "doc_id"]
_Numbers = Float[ndarray, " rows"]
MAX_PARTIAL_SUMS = 64  # of batches in memory, before they are added up
_READERS: dict[str, Callable[[Path], Iterable[Row | UnreadableRow]]] = {
    ".jsonl": json_lines,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
}
_SATISFIED = {"true": 1.0, "false": 0.0}


class Measure(NamedTuple):
    """Name and meaning of a measure; `better` is the desired direction."""

    name: str
    text: str
    better: str  # "lower" or "higher"


def measures(*, few_results: int, depths: Sequence[int], satisfaction: bool, clicks: bool) -> list[Measure]:
    """The measures of a report, in its order."""
    found = [
        Measure(f"irrelevant@{k}", f"share of irrelevant documents in the top {k}", "lower") for k in depths
    ]
    if satisfaction:
        found.append(Measure("satisfaction", "mean satisfaction, where it is known", "higher"))
    few = f"share of answers with fewer than {few_results}"
    found.append(Measure(f"fewer_than_{few_results}", few, "lower"))
    if clicks:
        found.append(Measure("click_through", "share of answers with a click", "higher"))
    return [
        *found,
        Measure("latency_ms", "mean time of an answer, in ms", "lower"),
        Measure("partial", "share of answers without all shards", "lower"),
        Measure("errors", "share of requests that failed (5xx)", "lower"),
    ]


class Outcomes:
    """Sums over the requests of an experiment; a row per unit stays in memory."""

    def __init__(
        self,
        *,
        few_results: int,
        satisfied: Mapping[str, float] | None = None,
        clicked: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """Args:
        few_results: an answer with fewer documents counts as too short.
        satisfied: request_id -> satisfaction from 0 to 1; None: not measured.
        clicked: request_id -> clicked documents; None: not measured.
        """
        self._few, self._satisfied, self._clicked = few_results, satisfied, clicked
        self._pieces: list[pa.Table] = []
        self._latency: defaultdict[tuple[str, str], list[Float32[ndarray, " requests"]]] = defaultdict(list)
        self.requests = 0
        self.rated = 0  # requests with feedback
        self.clicks = 0  # requests with a click on one of their documents

    def add(self, requests: pa.Table) -> None:
        """Add requests that :class:`scalingnote.experiment.access_log.RequestFilter` selected."""
        self.requests += len(requests)
        columns = {name: requests[name] for name in KEYS}
        for name, (total, count) in self._measured(requests):
            columns[f"{name}.sum"], columns[f"{name}.count"] = pa.array(total), pa.array(count)
        self._pieces.append(sum_by_unit(pa.table(columns)))
        if len(self._pieces) == MAX_PARTIAL_SUMS:
            self._pieces = [sum_by_unit(pa.concat_tables(self._pieces))]
        answered = requests.filter(pc.less(requests["status"], 400))
        for arm in pc.unique(answered["arm"]).to_pylist():
            of_arm = answered.filter(pc.equal(answered["arm"], arm))
            for stage in STAGES:
                self._latency[arm, stage].append(of_arm[f"{stage}_ms"].drop_null().to_numpy())

    def units(self) -> pa.Table:
        """A row per unit: `arm`, `unit`, and each measure's ``.sum`` and ``.count``."""
        return sum_by_unit(pa.concat_tables(self._pieces))

    def percentiles(self, arm: str, at: Sequence[int]) -> dict[str, list[float]]:
        """Stage -> milliseconds at the percentiles `at`, over the arm's answers."""
        none = np.empty(0, np.float32)
        known = {stage: np.concatenate([none, *self._latency[arm, stage]]) for stage in STAGES}
        return {stage: np.percentile(times, at).tolist() for stage, times in known.items() if len(times)}

    def _measured(self, requests: pa.Table) -> Iterator[tuple[str, tuple[_Numbers, _Numbers]]]:
        answered = requests["status"].to_numpy() < 400
        results = pc.fill_null(pc.list_value_length(requests["doc_ids"]), 0).to_numpy()
        enough_asked = pc.fill_null(requests["k"], self._few).to_numpy() >= self._few
        yield f"fewer_than_{self._few}", _share(results < self._few, of=answered & enough_asked)
        if self._satisfied is not None:
            ratings = [self._satisfied.get(each, np.nan) for each in requests["request_id"].to_pylist()]
            known = np.where(answered, np.array(ratings, float), np.nan)
            self.rated += int(np.isfinite(known).sum())
            yield "satisfaction", (np.nan_to_num(known), np.isfinite(known).astype(float))
        if self._clicked is not None:
            clicked = _clicked(self._clicked, requests) & answered
            self.clicks += int(clicked.sum())
            yield "click_through", _share(clicked, of=answered)
        total = requests["total_ms"].to_numpy().astype(float)  # null: NaN
        yield "latency_ms", (np.where(answered, np.nan_to_num(total), 0), (answered & ~np.isnan(total)) * 1.0)
        missing = pc.less(requests["shards_answered"], requests["shards"])
        shards_known = answered & pc.is_valid(missing).to_numpy()
        yield "partial", _share(pc.fill_null(missing, False).to_numpy(), of=shards_known)
        yield "errors", _share(~answered, of=np.ones(len(requests), bool))


def sum_by_unit(table: pa.Table) -> pa.Table:
    """One row per arm and unit, with sums of all other columns."""
    names = [name for name in table.column_names if name not in KEYS]
    summed = table.group_by(KEYS, use_threads=False).aggregate([(name, "sum") for name in names])
    return summed.rename_columns([*KEYS, *names])


def join_by_unit(units: pa.Table, further: pa.Table) -> pa.Table:
    """Join the per-unit sums of two tables; units missing in one of them get zeros."""
    both = units.join(further, keys=KEYS, join_type="full outer").combine_chunks()
    columns = {name: both[name] for name in KEYS}
    columns |= {name: pc.fill_null(both[name], 0.0) for name in both.column_names if name not in KEYS}
    return pa.table(columns).sort_by([(key, "ascending") for key in KEYS])


def _share(which: ndarray, *, of: ndarray) -> tuple[_Numbers, _Numbers]:
    return (which & of).astype(float), of.astype(float)


def _clicked(known: Mapping[str, frozenset[str]], requests: pa.Table) -> ndarray:
    """Whether one of the shown documents was clicked; clicks on other documents do not count."""
    request_ids = requests["request_id"].to_pylist()
    out = np.zeros(len(request_ids), bool)
    rows = [row for row, request_id in enumerate(request_ids) if request_id in known]
    shown = requests["doc_ids"].take(pa.array(rows, pa.int64())).to_pylist()
    out[rows] = [
        not known[request_ids[row]].isdisjoint(found or ()) for row, found in zip(rows, shown, strict=True)
    ]
    return out


def read_feedback(pattern: str, quarantine: Quarantine) -> dict[str, float]:
    """request_id -> satisfaction from 0 to 1; the last rating of a request counts."""
    satisfaction: dict[str, float] = {}
    for row in _rows(pattern, ("request_id", "satisfied"), quarantine, table="feedback"):
        value = _satisfaction(row["satisfied"])
        if value is None:
            quarantine.reject("feedback", row, "satisfied is neither true nor false nor from 0 to 1")
        else:
            satisfaction[row["request_id"]] = value
    return satisfaction


def read_clicks(pattern: str, quarantine: Quarantine) -> dict[str, frozenset[str]]:
    """request_id -> clicked documents."""
    clicked: defaultdict[str, set[str]] = defaultdict(set)
    for row in _rows(pattern, ("request_id", "doc_id"), quarantine, table="clicks"):
        if isinstance(row["doc_id"], str):
            clicked[row["request_id"]].add(row["doc_id"])
        else:
            quarantine.reject("clicks", row, "doc_id is no text")
    return {request_id: frozenset(doc_ids) for request_id, doc_ids in clicked.items()}


def check_files(pattern: str) -> None:
    """Raise DataError if files are missing or have an unknown format, without reading them."""
    for path in match_files(pattern):
        if path.suffix not in _READERS:
            raise DataError(f"{path} is none of {', '.join(_READERS)}: convert it or rename it")


def _rows(pattern: str, names: tuple[str, str], quarantine: Quarantine, *, table: str) -> Iterable[Row]:
    """Rows with both columns and a textual request_id; DataError if no row has them."""
    usable = False
    for path in match_files(pattern):
        if path.suffix == ".parquet" and (lacking := sorted({*names} - {*pq.read_schema(path).names})):
            raise DataError(f"{path} has no column {lacking[0]!r}: it needs {' and '.join(names)}")
        for row in _READERS[path.suffix](path):
            if isinstance(row, UnreadableRow):
                quarantine.reject(table, row.row, row.reason)
            elif lacking := [name for name in names if row.get(name) is None]:
                quarantine.reject(table, row, f"{lacking[0]} is missing")
            elif not isinstance(row["request_id"], str):
                quarantine.reject(table, row, "request_id is no text")
            else:
                usable = True
                yield row
    if not usable:
        raise DataError(f"no row of {pattern} has {' and '.join(names)}: check its columns")


def _satisfaction(value: Any) -> float | None:
    """A number from 0 to 1; in CSV numbers and booleans are text."""
    if isinstance(value, str):
        value = _SATISFIED.get(value.strip().lower(), value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and 0 <= number <= 1 else None


# --- judged results ----------------------------------------------------------------------------------------


class RequestSample:
    """A uniform sample of answered text queries per arm: those with the smallest hashes."""

    columns = ("request_id", "arm", "unit", "query", "doc_ids")

    def __init__(self, per_arm: int, *, depth: int, seed: int) -> None:
        """Keep `per_arm` requests, and `depth` documents of each answer; the seed is the hash's."""
        self._per_arm, self._depth, self._seed = per_arm, depth, seed
        self._kept: dict[str, pa.Table] = {}

    def add(self, requests: pa.Table) -> None:
        """Offer requests of the experiment."""
        answered = pc.and_(pc.less(requests["status"], 400), pc.is_valid(requests["query"]))
        table = requests.filter(pc.and_(answered, pc.is_valid(requests["doc_ids"])))
        # The time is hashed too, because a client may give all its requests the same id.
        parts = (table["request_id"], pc.cast(table["time"], pa.string()), str(self._seed))
        hashes = hash_of(pc.binary_join_element_wise(*parts, "\x1f"))
        table = table.select(self.columns).append_column("drawn", pa.array(hashes))
        for arm in pc.unique(table["arm"]).to_pylist():
            of_arm = table.filter(pc.equal(table["arm"], arm))
            candidates = pa.concat_tables([self._kept[arm], of_arm]) if arm in self._kept else of_arm
            self._kept[arm] = candidates.sort_by("drawn").slice(0, self._per_arm).combine_chunks()

    def table(self) -> pa.Table:
        """The sampled requests with `columns`."""
        kept = (self._kept[arm].select(self.columns) for arm in sorted(self._kept))
        table = pa.concat_tables([REQUESTS.empty_table().select(self.columns), *kept])
        best = pc.list_slice(table["doc_ids"], 0, self._depth)
        return table.set_column(len(self.columns) - 1, "doc_ids", pc.cast(best, pa.list_(pa.string())))


def pairs_to_judge(sample: pa.Table) -> pa.Table:
    """Distinct pairs of query and document that the sampled requests showed, sorted."""
    pairs = _shown_documents(sample).select(PAIR)
    return pairs.group_by(PAIR).aggregate([]).sort_by([(name, "ascending") for name in PAIR])


def irrelevant_by_unit(
    sample: pa.Table, judged: pa.Table, *, below: float, depths: Sequence[int]
) -> pa.Table:
    """Sums per unit: number of irrelevant documents and of scored documents in the top K of `depths`.

    `judged` has the score of each pair that the sample showed. A document with a score under `below` is
    irrelevant; one without a score does not count.
    """
    rows = _shown_documents(sample).join(judged, keys=PAIR, join_type="left outer")
    scored = pc.is_valid(rows["score"])
    irrelevant = pc.fill_null(pc.less(rows["score"], below), False)
    columns = {name: rows[name] for name in KEYS}
    for depth in depths:
        inside = pc.and_(pc.less(rows["rank"], depth), scored)
        columns[f"irrelevant@{depth}.sum"] = pc.cast(pc.and_(inside, irrelevant), pa.float64())
        columns[f"irrelevant@{depth}.count"] = pc.cast(inside, pa.float64())
    return sum_by_unit(pa.table(columns))


def _shown_documents(sample: pa.Table) -> pa.Table:
    """A row per document shown: `arm`, `unit`, `query`, `doc_id`, and `rank`, 0 at the top."""
    sample = sample.combine_chunks()
    doc_ids = sample["doc_ids"].combine_chunks()
    request = pc.list_parent_indices(doc_ids)
    starts = doc_ids.offsets.take(request)
    places = pa.array(range(len(request)), pa.int32())
    return pa.table(
        {
            **{name: sample[name].take(request) for name in (*KEYS, "query")},
            "doc_id": pc.list_flatten(doc_ids),
            "rank": pc.subtract(places, pc.subtract(starts, doc_ids.offsets[0])),
        }
    )
