"""Which logged requests belong to the experiment: batches of the access log in, its requests by arm out.

Only what the split itself decided is compared. A request that named its arm, or was answered under other
shares, is known by its arm not being the one its unit has: the split is computed again for every unit.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.experiment.assignment import arm_of
from scalingnote.experiment.config import TrafficSplit
from scalingnote.storage.exchange import hash_of

SEARCH = "/search"
UNITS_REMEMBERED = 1 << 20


class Selection:
    """Requests of one experiment, batch after batch; `left_out` counts the others by reason."""

    def __init__(self, split: TrafficSplit, *, start: float | None = None, end: float | None = None) -> None:
        """`start` and `end` in seconds since 1970, the latter no longer part of it."""
        self.left_out: Counter[str] = Counter()
        self.first, self.last = float("inf"), float("-inf")  # times of requests that belong to it
        self._start, self._end = start, end
        self._arm: Callable[[str], str] = lru_cache(UNITS_REMEMBERED)(lambda unit: arm_of(unit, split).name)

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """The requests of a batch that belong to it, each with the `arm` that its unit has."""
        table = pa.Table.from_batches([batch])
        table = self._keep(table, pc.equal(table["path"], SEARCH), "not a search")
        time = table["time"].to_numpy()
        inside = np.ones(len(table), bool)
        if self._start is not None:
            inside &= time >= self._start
        if self._end is not None:
            inside &= time < self._end
        table = self._keep(table, inside, "outside of start and end")
        status = table["status"].to_numpy()
        table = self._keep(table, (status < 400) | (status >= 500), "refused (4xx)")
        table = self._keep(table, pc.is_valid(table["unit"]), "without a unit")
        units = pc.dictionary_encode(table["unit"].combine_chunks())
        assigned = pa.array(map(self._arm, units.dictionary.to_pylist()), pa.string()).take(units.indices)
        table = table.append_column("assigned", assigned)
        # What failed early may not know its arm, but its unit has one all the same.
        own = pc.fill_null(pc.equal(table["arm"], table["assigned"]), True)
        table = self._keep(table, own, "not by this split")
        if len(table):
            times = table["time"].to_numpy()
            self.first, self.last = min(self.first, times.min()), max(self.last, times.max())
        assigned = table["assigned"]
        return table.drop_columns(["assigned"]).set_column(
            table.schema.get_field_index("arm"), "arm", assigned
        )

    def _keep(
        self, table: pa.Table, which: Bool[ndarray, " rows"] | pa.ChunkedArray, reason: str
    ) -> pa.Table:
        kept = table.filter(pa.array(which) if isinstance(which, ndarray) else which)
        if len(kept) < len(table):
            self.left_out[reason] += len(table) - len(kept)
        return kept


class Sample:
    """A uniform sample of answered text queries, so many per arm: those whose hash is smallest."""

    columns = ("request_id", "arm", "unit", "query", "doc_ids")

    def __init__(self, per_arm: int, *, depth: int, seed: int) -> None:
        """Of each answer, the best `depth` documents are kept."""
        self._per_arm, self._depth, self._seed = per_arm, depth, seed
        self._kept: dict[str, pa.Table] = {}

    def add(self, requests: pa.Table) -> None:
        """Requests of the experiment."""
        answered = pc.and_(pc.less(requests["status"], 400), pc.is_valid(requests["query"]))
        table = requests.filter(pc.and_(answered, pc.is_valid(requests["doc_ids"])))
        # With the time: a client may give all its requests one id.
        parts = (table["request_id"], pc.cast(table["time"], pa.string()), str(self._seed))
        drawn = hash_of(pc.binary_join_element_wise(*parts, "\x1f"))
        table = table.select(self.columns).append_column("drawn", pa.array(drawn))
        for arm in pc.unique(table["arm"]).to_pylist():
            mine = table.filter(pc.equal(table["arm"], arm))
            both = pa.concat_tables([self._kept[arm], mine]) if arm in self._kept else mine
            self._kept[arm] = both.sort_by("drawn").slice(0, self._per_arm).combine_chunks()

    def table(self) -> pa.Table:
        """The sampled requests, `columns` of each."""
        tables = [self._kept[arm].select(self.columns) for arm in sorted(self._kept)]
        if not tables:
            texts = {name: pa.string() for name in self.columns[:-1]}
            return pa.schema({**texts, "doc_ids": pa.list_(pa.string())}).empty_table()
        table = pa.concat_tables(tables)
        best = pc.list_slice(table["doc_ids"], 0, self._depth)
        return table.set_column(len(self.columns) - 1, "doc_ids", pc.cast(best, pa.list_(pa.string())))
