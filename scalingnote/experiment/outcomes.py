"""What came of an arm's requests: each measure's sum and count per unit, and latencies.

A measure is a mean over requests, or over documents: its count says over how many, its sum what they add up
to. Whoever has none of them (a user whose answers were never rated) has count 0 and is no observation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Float32
from numpy import ndarray

from scalingnote.experiment.access_log import STAGES
from scalingnote.experiment.statistics import Sums

KEYS = ["arm", "unit"]
_Numbers = Float[ndarray, " rows"]
_NONE = np.empty(0, np.float32)
PIECES = 64  # per-batch sums that are held before they are added up


class Measure(NamedTuple):
    """What a number means; `better` is the side that is wished for."""

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
    found.append(
        Measure(f"fewer_than_{few_results}", f"share of answers with fewer than {few_results}", "lower")
    )
    if clicks:
        found.append(Measure("click_through", "share of answers with a click", "higher"))
    return [
        *found,
        Measure("latency_ms", "mean time of an answer, in ms", "lower"),
        Measure("partial", "share of answers without all shards", "lower"),
        Measure("errors", "share of requests that failed (5xx)", "lower"),
    ]


class Outcomes:
    """Adds up requests of the experiment, batch after batch; a row per unit stays in memory."""

    def __init__(
        self,
        *,
        few_results: int,
        satisfied: Mapping[str, float] | None = None,
        clicked: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """`satisfied` and `clicked` (documents) by request_id."""
        self._few, self._satisfied, self._clicked = few_results, satisfied, clicked
        self._pieces: list[pa.Table] = []
        self._latency: dict[tuple[str, str], list[Float32[ndarray, " requests"]]] = {}
        self.requests = 0
        self.rated = 0  # requests with feedback
        self.clicks = 0  # requests with a click on a document that they showed

    def add(self, requests: pa.Table) -> None:
        """Requests as :class:`scalingnote.experiment.requests.Selection` gives them."""
        self.requests += len(requests)
        columns = {name: requests[name] for name in KEYS}
        for name, (total, count) in self._measured(requests):
            columns[f"{name}.sum"], columns[f"{name}.count"] = pa.array(total), pa.array(count)
        self._pieces.append(added(pa.table(columns)))
        if len(self._pieces) == PIECES:
            self._pieces = [added(pa.concat_tables(self._pieces))]
        answered = requests.filter(pc.less(requests["status"], 400))
        for arm in pc.unique(answered["arm"]).to_pylist():
            mine = answered.filter(pc.equal(answered["arm"], arm))
            for stage in STAGES:
                times = mine[f"{stage}_ms"].drop_null().to_numpy()
                self._latency.setdefault((arm, stage), []).append(times)

    def units(self) -> pa.Table:
        """A row per unit: `arm`, `unit`, and each measure's ``.sum`` and ``.count``."""
        return added(pa.concat_tables(self._pieces))

    def percentiles(self, arm: str, at: Sequence[int]) -> dict[str, list[float]]:
        """Stage -> milliseconds at each of these percentiles, over the arm's answers."""
        known = {stage: np.concatenate(self._latency.get((arm, stage), [_NONE])) for stage in STAGES}
        return {stage: np.percentile(times, at).tolist() for stage, times in known.items() if len(times)}

    def _measured(self, requests: pa.Table) -> Iterator[tuple[str, tuple[_Numbers, _Numbers]]]:
        answered = requests["status"].to_numpy() < 400
        results = pc.fill_null(pc.list_value_length(requests["doc_ids"]), 0).to_numpy()
        asked = pc.fill_null(requests["k"], self._few).to_numpy() >= self._few
        yield f"fewer_than_{self._few}", _share(results < self._few, of=answered & asked)
        if self._satisfied is not None:
            known = _values(self._satisfied, requests["request_id"], of=answered)
            self.rated += int(np.isfinite(known).sum())
            yield "satisfaction", (np.nan_to_num(known), np.isfinite(known).astype(float))
        if self._clicked is not None:
            clicked = _clicked(self._clicked, requests) & answered
            self.clicks += int(clicked.sum())
            yield "click_through", _share(clicked, of=answered)
        total = requests["total_ms"].to_numpy().astype(float)  # null: NaN
        yield "latency_ms", (np.where(answered, np.nan_to_num(total), 0), (answered & ~np.isnan(total)) * 1.0)
        missing = pc.less(requests["shards_answered"], requests["shards"])
        told = answered & pc.is_valid(missing).to_numpy()
        yield "partial", _share(pc.fill_null(missing, False).to_numpy(), of=told)
        yield "errors", _share(~answered, of=np.ones(len(requests), bool))


def added(table: pa.Table) -> pa.Table:
    """One row per arm and unit: everything else summed."""
    names = [name for name in table.column_names if name not in KEYS]
    summed = table.group_by(KEYS, use_threads=False).aggregate([(name, "sum") for name in names])
    return summed.rename_columns([*KEYS, *names])


def joined(units: pa.Table, further: pa.Table) -> pa.Table:
    """Per-unit sums of two kinds in one table; units that one of them lacks have zeros there."""
    both = units.join(further, keys=KEYS, join_type="full outer").combine_chunks()
    columns = [
        pc.fill_null(both[name], 0.0) if name not in KEYS else both[name] for name in both.column_names
    ]
    return pa.table(columns, names=both.column_names).sort_by([(key, "ascending") for key in KEYS])


def sums(units: pa.Table, arm: str, measure: str) -> Sums:
    """What one arm's units did in one measure."""
    mine = units.filter(pc.equal(units["arm"], arm))
    total, count = (mine[f"{measure}.{name}"].to_numpy() for name in ("sum", "count"))
    return Sums(total[count > 0], count[count > 0])


def _share(which: ndarray, *, of: ndarray) -> tuple[_Numbers, _Numbers]:
    return (which & of).astype(float), of.astype(float)


def _values(known: Mapping[str, float], request_ids: pa.ChunkedArray, *, of: ndarray) -> _Numbers:
    found = [known.get(request_id, np.nan) for request_id in request_ids.to_pylist()]
    return np.where(of, np.array(found, float), np.nan)


def _clicked(known: Mapping[str, frozenset[str]], requests: pa.Table) -> ndarray:
    """Whether a document that a request showed was clicked; clicks on others are no clicks on its answer."""
    request_ids = requests["request_id"].to_pylist()
    out = np.zeros(len(request_ids), bool)
    rows = [row for row, request_id in enumerate(request_ids) if request_id in known]
    for row, shown in zip(
        rows, requests["doc_ids"].take(pa.array(rows, pa.int64())).to_pylist(), strict=True
    ):
        out[row] = not known[request_ids[row]].isdisjoint(shown or ())
    return out
