"""Clicks from impressions: a bucket of users at a time, each click with skipped documents and a history.

    impressions ─by user─► bucket ─► clicks    hashes: query, user, clicked, skipped, history

A bucket has all impressions of its users. Ids are 64-bit hashes from here on. The sorted hashes of everything
that clicks refer to are written for the rest of the preparation:

    named.arrow         documents that were clicked, skipped or are in a history
    shown.arrow         documents that were clicked or skipped
    asked.arrow         queries
    known.arrow         users
    popularity.arrow    clicked documents, with their share of all clicks
"""

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64, UInt64
from numpy import ndarray

from scalingnote.datasets.splits import held_out_documents
from scalingnote.datasets.splits import queries as queries_of_split
from scalingnote.errors import DataError
from scalingnote.fuse.config import FuseConfig
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact, read_table, write_table
from scalingnote.storage.schema import IMPRESSIONS
from scalingnote.storage.shuffle import JsonRecord, NumberedSlice, TaskRunner, hash_of, run_slices, slices
from scalingnote.train.data import one_chunk
from scalingnote.train.prepare import merge_sorted, read_array

SCHEMA = pa.schema(
    IMPRESSIONS.field(name)
    for name in ("session_id", "user_id", "query_id", "doc_id", "position", "clicked", "timestamp")
)
NO_HASH = 0  # in place of a hash: an unknown user, no further document
CLICKS = "clicks"  # folder of the clicks by bucket
_EXCHANGE = "impressions"


def read_clicks(config: FuseConfig, dataset: Artifact, *, folder: str, each: TaskRunner) -> int:
    """Write clicks by bucket, and the sorted hashes of the documents, queries and users in them.

    Args:
        config: `parts` is the number of buckets.
        dataset: with impressions.
        folder: of the store.
        each: runs tasks in parallel.

    Returns:
        The number of clicks left out, as they are of test queries.

    Raises:
        DataError: there are no clicks to learn from.
    """
    run = partial(run_slices, folder=folder, each=each, room="fuse")
    if not dataset.table_parts("impressions"):
        raise DataError(
            f"{dataset.uri} has no impressions, which fusion learns from: "
            "set dataset.click_model, or fuse to null"
        )
    scatter = partial(
        _scatter,
        dataset=dataset,
        folder=folder,
        parts=config.parts,
        held_out=held_out_documents(dataset),
        test_queries=queries_of_split(dataset, "test")["query_id"].combine_chunks(),
    )
    scattered = run("scatter", scatter, slices(dataset, "impressions"))
    raw = run("clicks", partial(_clicks, config=config, folder=folder), range(config.parts))
    if not any(record["clicks"] for record in raw):
        raise DataError(
            f"{dataset.uri} has no clicks outside the test split: fusion has nothing to learn from"
        )
    for name in ("named", "shown", "asked", "known"):
        hashes = merge_sorted(
            [read_array(fs.join(folder, f"{name}/{b:05d}.arrow")) for b in range(config.parts)]
        )
        write_table(fs.join(folder, f"{name}.arrow"), pa.table({"hash": hashes}))
    _write_popularity(config, folder)
    return sum(record["test_clicks"] for record in scattered)


def _scatter(
    item: NumberedSlice,
    *,
    dataset: Artifact,
    folder: str,
    parts: int,
    held_out: pa.Array,
    test_queries: pa.Array,
) -> JsonRecord:
    """Impressions by user, without those of test queries, which must not be in histories either."""
    table = pa.concat_tables(dataset.table(part, SCHEMA.names) for part in item[1])
    table = table.filter(pc.invert(pc.is_in(table["doc_id"], value_set=held_out)))
    test = pc.is_in(table["query_id"], value_set=test_queries)
    test_clicks = pc.sum(pc.and_(test, table["clicked"])).as_py() or 0
    table = table.filter(pc.invert(test))
    bucket = shuffle.bucket_of(shuffle_keys(table), parts)
    shuffle.scatter(table, bucket, target=fs.join(folder, _EXCHANGE), name=f"{item[0]:05d}")
    return {"rows": len(table), "test_clicks": test_clicks}


def _clicks(item: tuple[int, int], *, config: FuseConfig, folder: str) -> JsonRecord:
    bucket = item[1]
    history = config.query.history
    table = training_rows(
        shuffle.gather(fs.join(folder, _EXCHANGE), bucket, schema=SCHEMA),
        last=history.last if history else 0,
        skipped=config.losses.group - 1,
    )
    shown = [np.asarray(table["clicked"])]
    if "skipped" in table.column_names:
        shown.append(flat(table["skipped"]))
    all_shown = _distinct(np.concatenate(shown))
    named = _distinct(np.concatenate([all_shown, flat(table["history"])]))
    clicked, counts = np.unique(np.asarray(table["clicked"]), return_counts=True)
    tables = {
        "named": pa.table({"hash": named}),
        "shown": pa.table({"hash": all_shown}),
        "asked": pa.table({"hash": _distinct(np.asarray(table["query"]))}),
        "known": pa.table({"hash": _distinct(np.asarray(table["user"]))}),
        "counts": pa.table({"hash": clicked, "count": counts}),
        CLICKS: one_chunk({name: table[name].combine_chunks() for name in table.column_names}),
    }
    for name, part in tables.items():
        write_table(fs.join(folder, f"{name}/{bucket:05d}.arrow"), part.combine_chunks())
    return {"clicks": len(table)}


def _write_popularity(config: FuseConfig, folder: str) -> None:
    """Write the share of each clicked document in all clicks of training."""
    counted = [
        [read_column(fs.join(folder, f"counts/{b:05d}.arrow"), name) for name in ("hash", "count")]
        for b in range(config.parts)
    ]
    hashes, place = np.unique(np.concatenate([hashes for hashes, _ in counted]), return_inverse=True)
    counts = np.bincount(place, weights=np.concatenate([count for _, count in counted]))
    write_table(
        fs.join(folder, "popularity.arrow"), pa.table({"hash": hashes, "share": counts / counts.sum()})
    )


def shuffle_keys(impressions: pa.Table) -> pa.ChunkedArray:
    """The key by which impressions are shuffled: the user, or the session of an unknown one."""
    return pc.coalesce(impressions["user_id"], impressions["session_id"])


def training_rows(impressions: pa.Table, *, last: int, skipped: int) -> pa.Table:
    """A row per click, ordered by user, start of the session, session and position.

    Args:
        impressions: of whole users, with the columns of SCHEMA.
        last: maximum length of a history.
        skipped: width of the column ``skipped``; 0: there is no such column.

    Returns:
        Columns of hashes: ``query``; ``user``, NO_HASH where unknown; ``clicked``; ``skipped``, documents
        shown for the same query in the same session and never clicked for it there, each once, first those
        above the click, the nearest first, padded with NO_HASH; ``history``, the last documents that the user
        clicked in sessions that started before this one, oldest first.
    """
    users, sessions, docs = (
        hash_of(shuffle_keys(impressions)),
        hash_of(impressions["session_id"]),
        hash_of(impressions["doc_id"]),
    )
    time = impressions["timestamp"].cast(pa.int64()).to_numpy()
    position = impressions["position"].to_numpy().astype(np.int64)
    clicked = impressions["clicked"].to_numpy(zero_copy_only=False).astype(bool)
    start = _session_starts(users, sessions, time)
    order = np.lexsort((position, sessions, start, users))
    users, sessions, docs, position, clicked, start = (
        column[order] for column in (users, sessions, docs, position, clicked, start)
    )
    queries = hash_of(impressions["query_id"])[order]
    known = np.asarray(pc.is_valid(impressions["user_id"]))[order]
    history, lengths = _histories(users[clicked], start[clicked], docs[clicked], known[clicked], last=last)
    skipped_docs = _skipped((users, sessions, queries), docs, position, clicked, most=skipped)
    table = {
        "query": pa.array(queries[clicked]),
        "user": pa.array(np.where(known, users, np.uint64(NO_HASH))[clicked]),
        "clicked": pa.array(docs[clicked]),
        "history": pa.LargeListArray.from_arrays(
            pa.array(np.concatenate([[0], np.cumsum(lengths)])), history
        ),
    }
    if skipped:
        table["skipped"] = pa.FixedSizeListArray.from_arrays(pa.array(skipped_docs.reshape(-1)), skipped)
    return pa.table(table)


def _session_starts(
    users: UInt64[ndarray, " rows"], sessions: UInt64[ndarray, " rows"], time: Int64[ndarray, " rows"]
) -> Int64[ndarray, " rows"]:
    order = np.lexsort((time, sessions, users))
    first = _changes(users[order], sessions[order])
    starts = np.empty_like(time)
    starts[order] = time[order][np.maximum.accumulate(np.where(first, np.arange(len(time)), 0))]
    return starts


def _histories(
    users: UInt64[ndarray, " clicks"],
    start: Int64[ndarray, " clicks"],
    docs: UInt64[ndarray, " clicks"],
    known: Bool[ndarray, " clicks"],
    *,
    last: int,
) -> tuple[pa.Array, Int64[ndarray, " clicks"]]:
    """The histories of all clicks, concatenated, and their lengths."""
    # Clicks are sorted by user and session start: a history is the clicks just before the session's first.
    number = np.arange(len(users))
    of_user = np.maximum.accumulate(np.where(_changes(users), number, 0))
    of_session = np.maximum.accumulate(np.where(_changes(users, start.view(np.uint64)), number, 0))
    lengths = np.where(known, np.minimum(of_session - of_user, last), 0)
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    flat = docs[np.repeat(of_session - lengths, lengths) + within]
    return pa.array(flat), lengths


def _skipped(
    search: tuple[UInt64[ndarray, " rows"], ...],
    docs: UInt64[ndarray, " rows"],
    position: Int64[ndarray, " rows"],
    clicked: Bool[ndarray, " rows"],
    *,
    most: int,
) -> UInt64[ndarray, "clicks most"]:
    """Skipped documents of each click; `search` is the user, the session and the query of each row."""
    searches, shown = _numbered(*search), _numbered(*search, docs)
    # Some logs have one row for a document that was shown, and another for the click on it.
    was_clicked = np.zeros(len(docs), bool)
    was_clicked[shown[clicked]] = True
    other = np.flatnonzero(~was_clicked[shown])
    other = other[np.argsort(searches[other], kind="stable")]
    click = np.flatnonzero(clicked)
    out = np.full((len(click), most), NO_HASH, np.uint64)
    # All pairs of a click and a document of the same search that was not clicked.
    first = np.searchsorted(searches[other], searches[click], side="left")
    count = np.searchsorted(searches[other], searches[click], side="right") - first
    row = np.repeat(np.arange(len(click)), count)
    ends = np.cumsum(count)
    beside = other[np.repeat(first, count) + np.arange(len(row)) - np.repeat(ends - count, count)]
    distance = position[beside] - position[click[row]]
    order = np.lexsort((np.abs(distance), distance > 0, row))
    row, beside = row[order], beside[order]
    once = _first_of_each(row, shown[beside])
    row, beside = row[once], beside[once]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    kept = place < most
    out[row[kept], place[kept]] = docs[beside[kept]]
    return out


def _numbered(*keys: UInt64[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
    """A number for each row, from 0; rows with equal keys have the same."""
    order = np.lexsort(keys)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(_changes(*(key[order] for key in keys))) - 1
    return numbers


def _first_of_each(*keys: Int64[ndarray, " rows"]) -> Bool[ndarray, " rows"]:
    """Marks the first row of each combination of keys."""
    order = np.lexsort(keys)
    first = np.zeros(len(order), bool)
    first[order] = _changes(*(key[order].view(np.uint64) for key in keys))
    return first


def _changes(*keys: UInt64[ndarray, " rows"]) -> Bool[ndarray, " rows"]:
    """Marks the rows that differ from the row before."""
    changed = np.ones(len(keys[0]), bool)
    changed[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return changed


def _distinct(hashes: UInt64[ndarray, " rows"]) -> UInt64[ndarray, " distinct"]:
    return np.setdiff1d(hashes, np.array([NO_HASH], np.uint64))


def flat(column: pa.ChunkedArray) -> ndarray:
    """The values of a column of lists."""
    return np.asarray(pc.list_flatten(column.combine_chunks()))


def read_column(uri: str, name: str) -> ndarray:
    """A column of an Arrow file."""
    return np.asarray(read_table(uri)[name].combine_chunks())
