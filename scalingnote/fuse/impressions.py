"""Impressions become clicks, each with the documents that the user skipped and those clicked before.

    impressions, users ─by user─► bucket ─► clicks

A bucket has all impressions of its users. Ids are 64-bit hashes.
"""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import UInt64
from numpy import ndarray

from scalingnote.datasets.splits import held_out_documents
from scalingnote.datasets.splits import queries as queries_of_split
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import IMPRESSIONS
from scalingnote.storage.shuffle import JsonRecord, NumberedSlice, hash_of
from scalingnote.train.data import one_chunk

SCHEMA = pa.schema(
    IMPRESSIONS.field(name)
    for name in ("session_id", "user_id", "query_id", "doc_id", "position", "clicked", "timestamp")
)
NO_HASH = 0  # in place of a hash: an unknown user, no further document
Documents = UInt64[ndarray, "clicks documents"]


def test_split(dataset: Artifact) -> dict[str, pa.Array]:
    """Find column values of the test split: impressions with them are left out, also from histories."""
    test = queries_of_split(dataset, "test")["query_id"].combine_chunks()
    return {"doc_id": held_out_documents(dataset), "query_id": test}


def scatter(
    item: NumberedSlice,
    *,
    dataset: Artifact,
    table: str,
    layout: pa.Schema,
    without: dict[str, pa.Array],
    folder: str,
    parts: int,
) -> JsonRecord:
    """Scatter the columns of a table, ``impressions`` or ``users``, by user.

    Rows that have a value of `without` in the column of that name are left out.
    """
    rows = pa.concat_tables(dataset.table(part, layout.names) for part in item[1])
    for column, values in without.items():
        rows = rows.filter(pc.invert(pc.is_in(rows[column], value_set=values)))
    keys = _keys(rows) if table == "impressions" else rows["user_id"]
    bucket = shuffle.bucket_of(keys, parts)
    shuffle.scatter(rows, bucket, target=fs.join(folder, table), name=f"{item[0]:05d}")
    return {"rows": len(rows)}


def _keys(impressions: pa.Table) -> pa.ChunkedArray:
    """Return the key by which impressions are scattered: the user, or the session if the user is unknown."""
    return pc.coalesce(impressions["user_id"], impressions["session_id"])


def training_rows(impressions: pa.Table, *, last: int, skipped: int) -> pa.Table:
    """Build a row per click, ordered by user, start of the session, session and position.

    Args:
        impressions: all impressions of each user, with the columns of SCHEMA.
        last: length of a history.
        skipped: number of documents of a row in addition to the clicked one.

    Returns:
        Columns of hashes. ``query``. ``user``: NO_HASH if unknown. ``group``: the clicked document, then
        those that were shown for the same query in the same session and not clicked for it there, each once,
        first those above the click, the nearest first. ``history``: the last documents that the user clicked
        in sessions that started before this one, the latest last. NO_HASH fills the end of a group and the
        front of a history.
    """
    rows = pd.DataFrame(
        {
            "user": hash_of(_keys(impressions)),
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
    group = np.column_stack([clicks["doc"], _skipped_documents(rows, clicks, most=skipped)])
    columns = {"query": pa.array(clicks["query"].to_numpy()), "user": pa.array(user)}
    history = arrow.to_arrow(_histories(clicks, last=last))
    return one_chunk({**columns, "group": arrow.to_arrow(group), "history": history})


def _histories(clicks: pd.DataFrame, *, last: int) -> Documents:
    # Clicks are sorted by user and session start: a history is the clicks just before the session's first.
    clicks = clicks.assign(number=np.arange(len(clicks)))
    of_user = clicks.groupby("user")["number"].transform("min").to_numpy(np.int64)
    of_session = clicks.groupby(["user", "start"])["number"].transform("min").to_numpy(np.int64)
    place = of_session[:, None] + np.arange(-last, 0)
    exists = clicks["known"].to_numpy()[:, None] & (place >= of_user[:, None])
    docs = np.append(clicks["doc"].to_numpy(), np.uint64(NO_HASH))
    return docs[np.where(exists, place, len(clicks))]


def _skipped_documents(rows: pd.DataFrame, clicks: pd.DataFrame, *, most: int) -> Documents:
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
    first = place < most
    out[pairs["click"].to_numpy()[first], place[first]] = pairs["doc"].to_numpy()[first]
    return out
