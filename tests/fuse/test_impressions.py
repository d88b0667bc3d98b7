"""Training rows equal those of slow and obvious code for the same log."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.fuse.impressions import NO_HASH, SCHEMA, training_rows
from scalingnote.storage.shuffle import hash_of


def log(seed: int, *, sessions: int = 60) -> pa.Table:
    """Draw sessions of few users that often start in the same minute, some without a user; rows in any order.

    Some sessions have two queries, and some documents occur twice: shown and then clicked, or shown again.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for session in range(sessions):
        user = None if rng.random() < 0.2 else f"u{rng.integers(5)}"
        start = dt.datetime(2024, 1, 1) + dt.timedelta(minutes=int(rng.integers(20)))
        for position, doc in enumerate(rng.integers(12, size=rng.integers(1, 8)), 1):
            time, clicked = start + dt.timedelta(seconds=position), bool(rng.random() < 0.4)
            query = f"q{(session + rng.integers(2)) % 7}"
            rows.append((f"s{session}", user, query, f"d{doc}", position, clicked, time))
    shuffled = [dict(zip(SCHEMA.names, rows[i], strict=True)) for i in rng.permutation(len(rows))]
    return pa.Table.from_pylist(shuffled, schema=SCHEMA)


def slow(table: pa.Table, *, last: int, skipped: int) -> list[tuple]:
    sessions: dict[str, list[dict]] = {}
    for row in table.to_pylist():
        sessions.setdefault(row["session_id"], []).append(row)
    out = []
    for rows in sessions.values():
        start, user = min(row["timestamp"] for row in rows), rows[0]["user_id"]
        earlier = [
            (min(r["timestamp"] for r in others), others[0]["session_id"], row["position"], row["doc_id"])
            for others in sessions.values()
            if user is not None
            and others[0]["user_id"] == user
            and min(r["timestamp"] for r in others) < start
            for row in others
            if row["clicked"]
        ]
        # Sessions that start at the same time are ordered by the hash of their names.
        earlier.sort(key=lambda c: (c[0], int(hash_of(pa.array([c[1]]))[0]), c[2]))
        history = tuple(c[3] for c in earlier)[len(earlier) - last if len(earlier) > last else 0 :]
        for click in (row for row in rows if row["clicked"]):
            shown = [r for r in rows if r["query_id"] == click["query_id"]]
            clicked = {r["doc_id"] for r in shown if r["clicked"]}
            shown.sort(
                key=lambda r: (r["position"] > click["position"], abs(r["position"] - click["position"]))
            )
            skipped_documents = tuple(
                dict.fromkeys(r["doc_id"] for r in shown if r["doc_id"] not in clicked)
            )[:skipped]
            out.append((click["query_id"], user, click["doc_id"], skipped_documents, history))
    return sorted(out, key=repr)


@pytest.mark.parametrize("seed", range(4))
def test_rows_equal_those_of_slow_code(seed: int):
    table = log(seed)
    table_of_rows = training_rows(table, last=3, skipped=2)
    names: dict[int, str | None] = {NO_HASH: None}
    for column in ("query_id", "user_id", "doc_id"):
        values = pa.array(sorted({v for v in table[column].to_pylist() if v}))
        names |= dict(zip(hash_of(values).tolist(), values.to_pylist(), strict=True))
    rows = [
        (
            names[row["query"]],
            names[row["user"]],
            names[row["group"][0]],
            tuple(names[doc] for doc in row["group"][1:] if doc != NO_HASH),
            tuple(names[doc] for doc in row["history"] if doc != NO_HASH),
        )
        for row in table_of_rows.to_pylist()
    ]
    assert sorted(rows, key=repr) == slow(table, last=3, skipped=2)


def test_clicked_documents_and_other_queries_are_not_skipped():
    """The log has a row when a document is shown, and another when it is clicked."""
    shown = [("q", "a", False), ("q", "b", False), ("q", "a", True), ("q", "b", False), ("other", "c", False)]
    moment = dt.datetime(2024, 1, 1)
    rows = [
        dict(zip(SCHEMA.names, ("s", None, query, doc, position, clicked, moment), strict=True))
        for position, (query, doc, clicked) in enumerate(shown, 1)
    ]
    (row,) = training_rows(pa.Table.from_pylist(rows, schema=SCHEMA), last=3, skipped=3).to_pylist()
    assert row["group"] == [*hash_of(pa.array(["a", "b"])), NO_HASH, NO_HASH]
    assert row["history"] == [NO_HASH] * 3


def test_impressions_without_clicks_have_no_rows():
    table = log(0).slice(0, 5)
    silent = table.set_column(5, "clicked", pa.array([False] * 5))
    assert len(training_rows(silent, last=3, skipped=2)) == 0
    assert len(training_rows(table.slice(0, 0), last=3, skipped=2)) == 0
