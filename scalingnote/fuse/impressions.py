"""Impressions become training rows: a click, what was passed over for it, and what was clicked before.

All of a user's impressions come together, so one bucket of users is done at a time. Ids are hashes from here.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64, UInt64
from numpy import ndarray

from scalingnote.storage.exchange import hash_of
from scalingnote.storage.schema import IMPRESSIONS

COLUMNS = ["session_id", "user_id", "query_id", "doc_id", "position", "clicked", "timestamp"]
SCHEMA = pa.schema([IMPRESSIONS.field(name) for name in COLUMNS])
NOBODY = 0  # in place of a hash: no user, no further document


def together(impressions: pa.Table) -> pa.ChunkedArray:
    """What impressions are dealt out by: the user, or the session of one who is not known."""
    return pc.coalesce(impressions["user_id"], impressions["session_id"])


def training_rows(impressions: pa.Table, *, last: int, skipped: int) -> pa.Table:
    """A row per click, in the order of users, times and places; columns are hashes.

    ``query``, ``user`` (NOBODY where unknown), ``clicked``, ``skipped`` (shown for the same query in the same
    session and never clicked for it there, each once, those above the click first, the nearest first; NOBODY
    where there are fewer) and ``history`` (at most `last` documents that the user clicked in sessions that
    started before this one, oldest first).
    """
    users, sessions, docs = (
        _hashes(together(impressions)),
        _hashes(impressions["session_id"]),
        _hashes(impressions["doc_id"]),
    )
    time = impressions["timestamp"].cast(pa.int64()).to_numpy()
    position = impressions["position"].to_numpy().astype(np.int64)
    clicked = impressions["clicked"].to_numpy(zero_copy_only=False).astype(bool)
    start = _session_starts(users, sessions, time)
    order = np.lexsort((position, sessions, start, users))
    users, sessions, docs, position, clicked, start = (
        column[order] for column in (users, sessions, docs, position, clicked, start)
    )
    queries = _hashes(impressions["query_id"])[order]
    known = np.asarray(pc.is_valid(impressions["user_id"]))[order]
    history, lengths = _histories(users[clicked], start[clicked], docs[clicked], known[clicked], last=last)
    passed = _skipped((users, sessions, queries), docs, position, clicked, most=skipped)
    table = {
        "query": pa.array(queries[clicked]),
        "user": pa.array(np.where(known, users, np.uint64(NOBODY))[clicked]),
        "clicked": pa.array(docs[clicked]),
        "history": pa.LargeListArray.from_arrays(
            pa.array(np.concatenate([[0], np.cumsum(lengths)])), history
        ),
    }
    if skipped:
        table["skipped"] = pa.FixedSizeListArray.from_arrays(pa.array(passed.reshape(-1)), skipped)
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
    """Documents clicked before each click, laid end to end, and how many each has."""
    number = np.arange(len(users))
    of_user = np.maximum.accumulate(np.where(_changes(users), number, 0))
    of_session = np.maximum.accumulate(np.where(_changes(users, start.view(np.uint64)), number, 0))
    lengths = np.where(known, np.minimum(of_session - of_user, last), 0)
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    flat = docs[np.repeat(of_session - lengths, lengths) + within]
    return pa.array(flat), lengths


def _skipped(
    asked: tuple[UInt64[ndarray, " rows"], ...],
    docs: UInt64[ndarray, " rows"],
    position: Int64[ndarray, " rows"],
    clicked: Bool[ndarray, " rows"],
    *,
    most: int,
) -> UInt64[ndarray, "clicks most"]:
    """`asked` says what was shown together: whose session it was, and for which query."""
    together, shown = _numbered(*asked), _numbered(*asked, docs)
    # Some logs have a row for a document that is shown, and another for the click on it.
    answers = np.zeros(len(docs), bool)
    answers[shown[clicked]] = True
    other = np.flatnonzero(~answers[shown])
    other = other[np.argsort(together[other], kind="stable")]
    click = np.flatnonzero(clicked)
    out = np.full((len(click), most), NOBODY, np.uint64)
    # Every click beside every document that was shown with it and not clicked.
    first = np.searchsorted(together[other], together[click], side="left")
    count = np.searchsorted(together[other], together[click], side="right") - first
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
    """A number for each row, from 0: the same where all keys are."""
    order = np.lexsort(keys)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(_changes(*(key[order] for key in keys))) - 1
    return numbers


def _first_of_each(*keys: Int64[ndarray, " rows"]) -> Bool[ndarray, " rows"]:
    """Which rows are the first with their keys."""
    order = np.lexsort(keys)
    first = np.zeros(len(order), bool)
    first[order] = _changes(*(key[order].view(np.uint64) for key in keys))
    return first


def _changes(*keys: UInt64[ndarray, " rows"]) -> Bool[ndarray, " rows"]:
    """Where a row differs from the one before it."""
    changed = np.ones(len(keys[0]), bool)
    changed[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return changed


def _hashes(ids: pa.ChunkedArray) -> UInt64[ndarray, " rows"]:
    return hash_of(ids)
