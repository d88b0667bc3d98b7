"""Two windows of time: what the first one shows is learnt from, what is new in the second one is the test.

A test query is one that nobody saw results for in the train window (ScalingNote, section 4.1.2). Windows
are half-open, [start, end), so that they may touch.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.datasets.config import Logs
from scalingnote.errors import DataError
from scalingnote.storage.schema import QRELS, QUERIES

# What a slice of the test window says: documents shown for a query, and how often each was clicked.
ASKED = pa.schema({"query_id": pa.string(), "doc_id": pa.string(), "clicks": pa.int64()})
# What a query was called, and in how many rows.
TEXTS = pa.schema({"query_id": pa.string(), "query": pa.string(), "rows": pa.int64()})


@dataclass(frozen=True)
class Windows:
    """[start, end) of training and of test, in milliseconds since 1970, UTC."""

    train: tuple[int, int]
    test: tuple[int, int]

    def shown(self) -> dict[str, list[str]]:
        """For people."""
        return {"train": [_iso(ms) for ms in self.train], "test": [_iso(ms) for ms in self.test]}


def windows(config: Logs, *, first: int, last: int) -> Windows:
    """The config's windows, or the span of the log (from `first` to `last`) cut before its `test_fraction`.

    DataError when the log lies outside of the train window.
    """
    if config.train and config.test:
        train, test = (
            (_ms(start), _ms(end)) for start, end in (config.train, config.test)
        )  # fmt: skip
    else:
        cut = last + 1 - round((last + 1 - first) * config.test_fraction)
        train, test = (first, cut), (cut, last + 1)
    if train[0] > last or train[1] <= first:
        raise DataError(
            f"no impression is in the train window, {_iso(train[0])} to {_iso(train[1])}: the log spans "
            f"{_iso(first)} to {_iso(last)}; set dataset.train and dataset.test, or dataset.timestamp_unit"
        )
    return Windows(train, test)


def inside(timestamps: pa.ChunkedArray, window: tuple[int, int]) -> pa.ChunkedArray:
    """Which timestamps (milliseconds) are in [start, end)."""
    ms = timestamps.cast(pa.int64())
    return pc.and_(pc.greater_equal(ms, window[0]), pc.less(ms, window[1]))


def asked(impressions: pa.Table, *, min_dwell_s: float) -> pa.Table:
    """ASKED of some impressions: a row per query and document shown, also where nobody clicked.

    A click below `min_dwell_s` does not count; one whose dwell time nobody measured does, as in collect.
    """
    counted = pc.fill_null(impressions["clicked"], False)
    long_enough = pc.fill_null(pc.greater_equal(impressions["dwell_s"], min_dwell_s), True)
    counted = pc.and_(counted, long_enough)
    rows = pa.table([impressions["query_id"], impressions["doc_id"], counted.cast(pa.int64())], ASKED)
    return added_up(rows)


def texts(rows: pa.Table, *, weight: int) -> pa.Table:
    """TEXTS of rows that name queries, each counting `weight` times; rows without a text say nothing."""
    rows = rows.filter(pc.greater(pc.binary_length(rows["query"]), 0))
    counted = pa.array(np.full(len(rows), weight, np.int64))
    return added_up(pa.table([rows["query_id"], rows["query"], counted], TEXTS))


def added_up(rows: pa.Table) -> pa.Table:
    """ASKED or TEXTS with equal rows as one, their numbers (the last column) added."""
    *keys, number = rows.column_names
    total = rows.group_by(keys, use_threads=False).aggregate([(number, "sum")])
    return total.rename_columns([*keys, number]).cast(rows.schema)


def first_of_each(rows: pa.Table, keys: list[str]) -> Bool[ndarray, " rows"]:
    """Which rows are the first with their keys."""
    numbered = rows.select(keys).append_column("_row", pa.array(np.arange(len(rows))))
    first = numbered.group_by(keys, use_threads=False).aggregate([("_row", "min")])["_row_min"]
    kept = np.zeros(len(rows), dtype=bool)
    kept[first.to_numpy()] = True
    return kept


@dataclass(frozen=True)
class Settled:
    """The queries of one bucket: QUERIES sorted by id, QRELS of those for test, and how many are neither."""

    queries: pa.Table
    qrels: pa.Table
    left_out: dict[str, int]


def settle(trained: pa.Array, *, asked: pa.Table, texts: pa.Table, judged: pa.Table) -> Settled:
    """Deal the queries of a bucket out: those `trained` are for training, of the others those are for test
    of which `judged` (QRELS) knows a relevant document.

    `asked` is ASKED of the whole test window, and `texts` TEXTS of the whole log, by bucket.
    """
    fresh = pc.and_(
        pc.greater(judged["relevance"], 0), pc.invert(pc.is_in(judged["query_id"], value_set=trained))
    )
    test = judged.filter(fresh)["query_id"].unique()
    ids = pa.concat_arrays([trained, test])
    usual = _usual(texts)
    text = usual["query"].take(pc.index_in(ids, value_set=usual["query_id"].combine_chunks()))
    split = pa.array(["train"] * len(trained) + ["test"] * len(test), pa.string())
    in_test = asked["query_id"].unique()
    seen = pc.is_in(in_test, value_set=trained)
    silent = pc.invert(pc.or_(seen, pc.is_in(in_test, value_set=test)))
    logged = texts.filter(pc.greater(texts["rows"], 0))["query_id"].unique()
    elsewhere = pc.invert(pc.is_in(logged, value_set=pa.concat_arrays([trained, in_test])))
    qrels = judged.filter(pc.is_in(judged["query_id"], value_set=test))
    return Settled(
        pa.table([ids, text, split], QUERIES).sort_by("query_id"),
        qrels.sort_by([("query_id", "ascending"), ("doc_id", "ascending")]),
        {
            "queries of the test window that training has seen": _count(seen),
            "queries of the test window without a relevant document": _count(silent),
            "queries without an impression in either window": _count(elsewhere),
        },
    )


def clicked(asked: pa.Table, *, min_clicks: int) -> pa.Table:
    """QRELS of relevance 1 from ASKED: documents with `min_clicks` clicks."""
    enough = asked.filter(pc.greater_equal(asked["clicks"], min_clicks)).select(["query_id", "doc_id"])
    return enough.append_column("relevance", pa.array(np.ones(len(enough), np.int32))).cast(QRELS)


def _usual(texts: pa.Table) -> pa.Table:
    """One text for each query: that of most rows, of equals the first in the alphabet."""
    order = [("query_id", "ascending"), ("rows", "descending"), ("query", "ascending")]
    texts = texts.sort_by(order)
    return texts.filter(pa.array(first_of_each(texts, ["query_id"])))


def _count(which: pa.Array | pa.ChunkedArray) -> int:
    return pc.sum(which).as_py() or 0


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def _iso(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms / 1000:.0f} s after 1970"
