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
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import UInt64
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
from scalingnote.train.prepare import merge_hashes

SCHEMA = pa.schema(
    IMPRESSIONS.field(name)
    for name in ("session_id", "user_id", "query_id", "doc_id", "position", "clicked", "timestamp")
)
NO_HASH = 0  # in place of a hash: an unknown user, no further document
CLICKS = "clicks"  # folder of the clicks by bucket
_EXCHANGE = "impressions"


def read_clicks(config: FuseConfig, dataset: Artifact, *, folder: str, each: TaskRunner) -> int:
    """Write clicks by bucket, and the sorted hashes of the documents, queries and users in them.

    Returns the number of clicks that are left out, as they are of test queries. DataError if the dataset has
    no clicks to learn from.
    """
    run = partial(run_slices, folder=folder, each=each, section="fuse")
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
        merge_hashes(folder, name, files=config.parts)
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
    counted = pa.concat_tables(
        read_table(fs.join(folder, f"counts/{b:05d}.arrow")) for b in range(config.parts)
    )
    clicks = counted.group_by("hash").aggregate([("count", "sum")]).sort_by("hash")
    counts = np.asarray(clicks["count_sum"])
    popularity = pa.table({"hash": clicks["hash"], "share": counts / counts.sum()})
    write_table(fs.join(folder, "popularity.arrow"), popularity.combine_chunks())


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
    rows = pd.DataFrame(
        {
            "user": hash_of(shuffle_keys(impressions)),
            "known": np.asarray(pc.is_valid(impressions["user_id"])),
            "session": hash_of(impressions["session_id"]),
            "query": hash_of(impressions["query_id"]),
            "doc": hash_of(impressions["doc_id"]),
            "time": impressions["timestamp"].cast(pa.int64()).to_numpy(),
            "position": impressions["position"].to_numpy().astype(np.int64),
            "clicked": impressions["clicked"].to_numpy(zero_copy_only=False).astype(bool),
        }
    )
    rows["start"] = rows.groupby(["user", "session"])["time"].transform("min")
    rows = rows.sort_values(["user", "start", "session", "position"], ignore_index=True)
    clicks = rows[rows["clicked"]].reset_index(drop=True)
    user = np.where(clicks["known"], clicks["user"], np.uint64(NO_HASH))
    table = {
        "query": pa.array(clicks["query"].to_numpy()),
        "user": pa.array(user),
        "clicked": pa.array(clicks["doc"].to_numpy()),
        "history": _histories(clicks, last=last),
    }
    if skipped:
        documents = pa.array(_skipped(rows, clicks, most=skipped).reshape(-1))
        table["skipped"] = pa.FixedSizeListArray.from_arrays(documents, skipped)
    return pa.table(table)


def _histories(clicks: pd.DataFrame, *, last: int) -> pa.Array:
    """The history of each click."""
    # Clicks are sorted by user and session start: a history is the clicks just before the session's first.
    clicks = clicks.assign(number=np.arange(len(clicks)))
    of_user = clicks.groupby("user")["number"].transform("min").to_numpy(np.int64)
    of_session = clicks.groupby(["user", "start"])["number"].transform("min").to_numpy(np.int64)
    lengths = np.where(clicks["known"], np.minimum(of_session - of_user, last), 0)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    docs = clicks["doc"].to_numpy()[np.repeat(of_session - lengths, lengths) + within]
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(docs))


def _skipped(rows: pd.DataFrame, clicks: pd.DataFrame, *, most: int) -> UInt64[ndarray, "clicks most"]:
    """Skipped documents of each click."""
    search = ["user", "session", "query"]
    # Some logs have one row for a document that was shown, and another for the click on it.
    was_clicked = rows.groupby([*search, "doc"])["clicked"].transform("any")
    others = rows.loc[~was_clicked, [*search, "doc", "position"]]
    pairs = clicks[[*search, "position"]].reset_index(names="click").merge(others, on=search)
    distance = pairs["position_y"] - pairs["position_x"]
    pairs = pairs.assign(below=distance > 0, distance=distance.abs())
    pairs = pairs.sort_values(["click", "below", "distance"]).drop_duplicates(["click", "doc"])
    place = pairs.groupby("click").cumcount().to_numpy()
    out = np.full((len(clicks), most), NO_HASH, np.uint64)
    kept = place < most
    out[pairs["click"].to_numpy()[kept], place[kept]] = pairs["doc"].to_numpy()[kept]
    return out


def _distinct(hashes: UInt64[ndarray, " rows"]) -> UInt64[ndarray, " distinct"]:
    return np.setdiff1d(hashes, np.array([NO_HASH], np.uint64))


def flat(column: pa.ChunkedArray) -> ndarray:
    """The values of a column of lists."""
    return np.asarray(pc.list_flatten(column.combine_chunks()))
