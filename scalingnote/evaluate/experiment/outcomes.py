"""Outcomes of requests: sums and counts of each measure per unit, latencies, and what users said and clicked.

A measure is a mean over requests or documents: its count is their number, its sum what they add up to. A
unit with count 0 (a user whose answers were never rated) is no observation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from jaxtyping import Float, Float32
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.datasets.input_files import match_files
from scalingnote.evaluate.experiment.access_log import REQUESTS, STAGES
from scalingnote.storage.shuffle import hash_of

KEYS = ["arm", "unit"]
PAIR = ["query", "doc_id"]
_Numbers = Float[ndarray, " rows"]
FEW_RESULTS = 5  # an answer with fewer documents counts as too short
DEPTHS = (4, 20)  # of the share of irrelevant documents
MAX_PARTIAL_SUMS = 64  # of batches in memory, before they are added up
# Ids are text, also those that look like numbers.
_IDS = pa.schema({"request_id": pa.string(), "doc_id": pa.string()})
_READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".jsonl": partial(pa.json.read_json, parse_options=pa.json.ParseOptions(explicit_schema=_IDS)),
    ".csv": partial(pa.csv.read_csv, convert_options=pa.csv.ConvertOptions(column_types=_IDS)),
    ".parquet": pq.read_table,
}


class Measure(NamedTuple):
    """Name and meaning of a measure; `better` is the desired direction."""

    name: str
    text: str
    better: str  # "lower" or "higher"


def measures(*, judged: bool, satisfaction: bool, clicks: bool) -> list[Measure]:
    """The measures of a report, in its order."""
    irrelevant = [
        Measure(f"irrelevant@{k}", f"share of irrelevant documents in the top {k}", "lower") for k in DEPTHS
    ]
    few = f"share of answers with fewer than {FEW_RESULTS}"
    return [
        *(irrelevant if judged else []),
        *(
            [Measure("satisfaction", "mean satisfaction, where it is known", "higher")]
            if satisfaction
            else []
        ),
        Measure(f"fewer_than_{FEW_RESULTS}", few, "lower"),
        *([Measure("click_through", "share of answers with a click", "higher")] if clicks else []),
        Measure("latency_ms", "mean time of an answer, in ms", "lower"),
        Measure("partial", "share of answers without all shards", "lower"),
        Measure("errors", "share of requests that failed (5xx)", "lower"),
    ]


class Outcomes:
    """Sums over the requests of an experiment; a row per unit stays in memory."""

    def __init__(
        self,
        *,
        satisfied: Mapping[str, float] | None = None,
        clicked: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """Args:
        satisfied: request_id -> satisfaction from 0 to 1; None: not measured.
        clicked: request_id -> clicked documents; None: not measured.
        """
        self._satisfied, self._clicked = satisfied, clicked
        self._pieces: list[pa.Table] = []
        self._latency: defaultdict[tuple[str, str], list[Float32[ndarray, " requests"]]] = defaultdict(list)
        self.requests = 0
        self.rated = 0  # requests with feedback
        self.clicks = 0  # requests with a click on one of their documents

    def add(self, requests: pa.Table) -> None:
        """Add requests that :class:`scalingnote.evaluate.experiment.access_log.RequestFilter` selected."""
        self.requests += len(requests)
        columns = {name: requests[name] for name in KEYS}
        for name, (total, count) in self._measure(requests):
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

    def _measure(self, requests: pa.Table) -> Iterator[tuple[str, tuple[_Numbers, _Numbers]]]:
        answered = requests["status"].to_numpy() < 400
        results = pc.fill_null(pc.list_value_length(requests["doc_ids"]), 0).to_numpy()
        wants_enough = pc.fill_null(requests["k"], FEW_RESULTS).to_numpy() >= FEW_RESULTS
        yield f"fewer_than_{FEW_RESULTS}", _share(results < FEW_RESULTS, of=answered & wants_enough)
        if self._satisfied is not None:
            ratings = [self._satisfied.get(each, np.nan) for each in requests["request_id"].to_pylist()]
            known = np.where(answered, np.array(ratings, float), np.nan)
            self.rated += int(np.isfinite(known).sum())
            yield "satisfaction", (np.nan_to_num(known), np.isfinite(known).astype(float))
        if self._clicked is not None:
            clicked = _has_click(self._clicked, requests) & answered
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


def _has_click(known: Mapping[str, frozenset[str]], requests: pa.Table) -> ndarray:
    """Whether one of the shown documents was clicked; clicks on other documents do not count."""
    request_ids = requests["request_id"].to_pylist()
    out = np.zeros(len(request_ids), bool)
    rows = [row for row, request_id in enumerate(request_ids) if request_id in known]
    shown = requests["doc_ids"].take(pa.array(rows, pa.int64())).to_pylist()
    out[rows] = [
        not known[request_ids[row]].isdisjoint(found or ()) for row, found in zip(rows, shown, strict=True)
    ]
    return out


def read_feedback(pattern: str) -> dict[str, float]:
    """request_id -> satisfaction from 0 to 1; the last rating of a request counts.

    Raises:
        DataError: a file cannot be read, lacks a column, or has a value that is no satisfaction.
    """
    satisfaction: dict[str, float] = {}
    for path, table in _read_tables(pattern, "satisfied"):
        try:
            values = table["satisfied"].cast(pa.float64())
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: satisfied is neither true or false nor a number: {error}") from error
        if wrong := values.filter(pc.or_(pc.less(values, 0), pc.greater(values, 1))):
            raise DataError(f"{path}: satisfied is {wrong[0]}: it goes from 0 to 1")
        satisfaction |= zip(table["request_id"].to_pylist(), values.to_pylist(), strict=True)
    return satisfaction


def read_clicks(pattern: str) -> dict[str, frozenset[str]]:
    """request_id -> clicked documents; DataError if a file cannot be read or lacks a column."""
    clicked: dict[str, frozenset[str]] = {}
    for _, table in _read_tables(pattern, "doc_id"):
        found = table.group_by("request_id").aggregate([("doc_id", "distinct")])
        for request_id, doc_ids in zip(*(column.to_pylist() for column in found.columns), strict=True):
            clicked[request_id] = clicked.get(request_id, frozenset()).union(doc_ids)
    return clicked


def check_files(pattern: str) -> None:
    """Raise DataError if files are missing or have an unknown format, without reading them."""
    for path in match_files(pattern):
        if path.suffix not in _READERS:
            raise DataError(f"{path} is none of {', '.join(_READERS)}: convert it or rename it")


def _read_tables(pattern: str, column: str) -> Iterator[tuple[Path, pa.Table]]:
    """The columns request_id and `column` of each file, without rows that lack one of them."""
    for path in match_files(pattern):
        try:
            table = _READERS[path.suffix](path).select(["request_id", column])
        except (pa.ArrowInvalid, KeyError) as error:
            raise DataError(f"{path} is no table of request_id and {column}: {error}") from error
        yield path, table.drop_null()


# --- judged results ----------------------------------------------------------------------------------------


class RequestSample:
    """A uniform sample of answered text queries per arm: those with the smallest hashes."""

    columns = ("request_id", "arm", "unit", "query", "doc_ids")

    def __init__(self, per_arm: int) -> None:
        """Keep `per_arm` requests, and as many documents of each answer as the deepest measure needs."""
        self._per_arm = per_arm
        self._kept: dict[str, pa.Table] = {}

    def add(self, requests: pa.Table) -> None:
        """Offer requests of the experiment."""
        answered = pc.and_(pc.less(requests["status"], 400), pc.is_valid(requests["query"]))
        table = requests.filter(pc.and_(answered, pc.is_valid(requests["doc_ids"])))
        # The time is hashed too, because a client may give all its requests the same id.
        parts = (table["request_id"], pc.cast(table["time"], pa.string()), "0")
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
        best = pc.list_slice(table["doc_ids"], 0, max(DEPTHS))
        return table.set_column(len(self.columns) - 1, "doc_ids", pc.cast(best, pa.list_(pa.string())))


def pairs_to_judge(sample: pa.Table) -> pa.Table:
    """Distinct pairs of query and document that the sampled requests showed, sorted."""
    pairs = _shown_documents(sample).select(PAIR)
    return pairs.group_by(PAIR).aggregate([]).sort_by([(name, "ascending") for name in PAIR])


def irrelevant_by_unit(sample: pa.Table, judged: pa.Table, *, below: float) -> pa.Table:
    """Sums per unit: number of irrelevant documents and of scored documents in the top K of DEPTHS.

    `judged` has the score of each pair that the sample showed. A document with a score under `below` is
    irrelevant; one without a score does not count.
    """
    rows = _shown_documents(sample).join(judged, keys=PAIR, join_type="left outer")
    scored = pc.is_valid(rows["score"])
    irrelevant = pc.fill_null(pc.less(rows["score"], below), False)
    columns = {name: rows[name] for name in KEYS}
    for depth in DEPTHS:
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
