import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.storage.schema import TRIPLETS
from scalingnote.triplets.mine.config import MineConfig
from scalingnote.triplets.mine.job import candidates, positives_by_query, refresh

RANKING = [("a", 0.9), ("b", 0.8), ("c", 0.7), ("d", 0.6), ("e", 0.5)]


def triplets(*rows: tuple[str, str, list[str]]) -> pa.Table:
    full = [
        {
            "query_id": query, "query": query, "positive": positive, "negatives": negatives,
            "source": "click", "hop": "one", "via": None, "weight": 1.0, "split": "train",
        }
        for query, positive, negatives in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(full, schema=TRIPLETS)


def test_the_window_is_counted_before_anything_is_left_out():
    config = MineConfig(first_rank=2, last_rank=4, max_score_ratio=None)
    assert candidates(RANKING, known={"b"}, positive_score=None, config=config) == ["c", "d"]


def test_what_scores_nearly_as_the_positive_is_no_negative():
    config = MineConfig(first_rank=1, last_rank=5, max_score_ratio=0.75)
    assert candidates(RANKING, known={"a"}, positive_score=0.9, config=config) == ["d", "e"]
    assert candidates(RANKING, known={"a"}, positive_score=None, config=config) == ["b", "c", "d", "e"]
    assert candidates(RANKING, known={"a"}, positive_score=-0.1, config=config) == ["b", "c", "d", "e"]


def test_rows_that_find_too_few_keep_their_own_and_none_is_lost():
    table = triplets(
        ("q", "a", ["y", "z"]), ("r", "a", ["y", "z"]), ("s", "a", []),
        ("t", "a", ["b"]), ("u", "a", ["z"]), ("v", "a", []), ("w", "a", ["y", "z"]),
    )  # fmt: skip
    config = MineConfig(first_rank=2, last_rank=3, num_negatives=2, max_score_ratio=None)
    rankings = {"q": RANKING} | dict.fromkeys("tuvw", RANKING[:2])  # b alone is left of the window
    fresh, counts = refresh(
        table, rankings, known=positives_by_query(table), positive_scores=[None] * 7, config=config
    )
    found = {row["query_id"]: row["negatives"] for row in fresh.to_pylist()}
    assert sorted(found.pop("q")) == ["b", "c"]
    assert found == {"r": ["y", "z"], "s": [], "t": ["b"], "u": ["b", "z"], "v": ["b"], "w": ["y", "z"]}
    assert counts == {"mined": 1, "kept": 3, "mixed": 3, "short": 3}


@given(st.sets(st.sampled_from("abcde")), st.integers(1, 5), st.integers(0, 3), st.integers(0, 99))
def test_mined_negatives_lie_in_the_window_and_answer_nothing(known, first, width, seed):
    config = MineConfig(first_rank=first, last_rank=first + width, max_score_ratio=None, seed=seed)
    table = triplets(("q", "p", ["z"]), *(("q", doc, ["z"]) for doc in sorted(known)))
    fresh, counts = refresh(
        table,
        {"q": RANKING},
        known=positives_by_query(table),
        positive_scores=[None] * len(table),
        config=config,
    )
    window = {doc for doc, _ in RANKING[first - 1 : first + width]} - known
    assert {row[0] for row in fresh["negatives"].to_pylist()} <= (window or {"z"})
    assert counts == ({"mined": len(table)} if window else {"kept": len(table)})
