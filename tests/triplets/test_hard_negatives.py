"""The choice of negatives from rankings; lines of run files are scattered to the parts of their queries."""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.datasets import input_files
from scalingnote.datasets.readers import find_trec_slices
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.schema import TRIPLETS
from scalingnote.storage.shuffle import bucket_of, run_slices
from scalingnote.triplets.config import MineConfig
from scalingnote.triplets.mine.job import candidates, positives_by_query, read_runs, refresh, scatter_lines
from scalingnote.triplets.mine.search import MineContext

RANKING = [("a", 0.9), ("b", 0.8), ("c", 0.7), ("d", 0.6), ("e", 0.5)]


def triplet_rows(*rows: tuple[str, str, list[str]]) -> pa.Table:
    full = [
        {
            "query_id": query, "query": query, "positive": positive, "negatives": negatives,
            "source": "click", "hop": "one", "via": None, "weight": 1.0, "split": "train",
        }
        for query, positive, negatives in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(full, schema=TRIPLETS)


def test_documents_that_score_like_the_positive_are_left_out():
    config = MineConfig(first_rank=1, last_rank=5, max_score_ratio=0.75)
    assert candidates(RANKING, known={"a"}, positive_score=0.9, config=config) == ["d", "e"]
    assert candidates(RANKING, known={"a"}, positive_score=None, config=config) == ["b", "c", "d", "e"]
    assert candidates(RANKING, known={"a"}, positive_score=-0.1, config=config) == ["b", "c", "d", "e"]


def test_rows_with_too_few_candidates_keep_old_negatives():
    table = triplet_rows(
        ("q", "a", ["y", "z"]), ("r", "a", ["y", "z"]), ("s", "a", []),
        ("t", "a", ["b"]), ("u", "a", ["z"]), ("v", "a", []), ("w", "a", ["y", "z"]),
    )  # fmt: skip
    config = MineConfig(first_rank=2, last_rank=3, num_negatives=2, max_score_ratio=None)
    rankings = {"q": RANKING} | dict.fromkeys("tuvw", RANKING[:2])  # only b is in the window
    fresh, counts = refresh(
        table, rankings, known=positives_by_query(table), positive_scores=[None] * 7, config=config
    )
    negatives = {row["query_id"]: row["negatives"] for row in fresh.to_pylist()}
    assert sorted(negatives.pop("q")) == ["b", "c"]
    assert negatives == {"r": ["y", "z"], "s": [], "t": ["b"], "u": ["b", "z"], "v": ["b"], "w": ["y", "z"]}
    assert counts == {"mined": 1, "kept": 3, "mixed": 3, "short": 3}


@given(st.sets(st.sampled_from("abcde")), st.integers(1, 5), st.integers(0, 3), st.integers(0, 99))
def test_mined_negatives_are_in_the_window_and_not_positives(known, first, width, seed):
    config = MineConfig(first_rank=first, last_rank=first + width, max_score_ratio=None, seed=seed)
    table = triplet_rows(("q", "p", ["z"]), *(("q", doc, ["z"]) for doc in sorted(known)))
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


# --- run files ----------------------------------------------------------------------------------------------

PARTS = 3
QUERY_IDS = np.array(["q0", "q1", "q1", "q2", "q3", "q9", "q4"])  # q9 is in no run file


@pytest.fixture
def triplets(tmp_path) -> Artifact:
    """Write each query to the part of its hash."""
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    part_of = bucket_of(pa.array(QUERY_IDS), PARTS)
    for number in range(PARTS):
        query_ids = QUERY_IDS[part_of == number]
        table = pa.table({"query_id": pa.array(query_ids, pa.string()), "positive": ["d1"] * len(query_ids)})
        draft.write_table(f"triplets/part-{number:05d}.parquet", table)
    return draft.commit(counts={})


def cut(triplets: Artifact, folder: Path, *runs: Path) -> MineContext:
    held_out = pa.array(["out"])
    context = MineContext(str(folder), PARTS, MineConfig(), triplets, triplets, held_out, output="")
    lines = [(file, piece) for file, path in enumerate(runs) for piece in find_trec_slices(str(path))]
    scatter = partial(scatter_lines, context=context)
    run_slices("lines", scatter, lines, folder=context.folder, each=map, section="mine")
    return context


def test_a_part_reads_the_lines_of_its_own_queries(triplets, tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "SLICE_BYTES", 64)  # two or three lines
    first = {f"q{i}": [("d0", 4.0), ("d1", 3.0), ("out", 2.5), ("d2", 2.0)] for i in range(6)}
    trec.write_run(str(tmp_path / "first"), first, tag="a")
    trec.write_run(str(tmp_path / "second"), {"q1": [("d7", 9.0), ("d8", 8.0)]}, tag="b")
    context = cut(triplets, tmp_path / "work", tmp_path / "first", tmp_path / "second")
    of_first = [("d0", 4.0), ("d1", 3.0), ("d2", 2.0)]
    all_query_ids: list[str] = []
    for number, name in enumerate(triplets.names("triplets/", ".parquet")):
        table = triplets.table(name)
        query_ids = table["query_id"].to_pylist()
        rows, rankings, scores = read_runs(number, table, context)
        assert rows.tolist() == [*range(len(query_ids))]
        assert rankings.keys() == {*query_ids} - {"q9"}
        for query_id in rankings:  # if a query is in both files, the last file counts
            assert rankings[query_id] == ([("d7", 9.0), ("d8", 8.0)] if query_id == "q1" else of_first)
        expected = {"q1": 8.0, "q9": None}  # not in the run: at most its last score
        assert scores == [expected.get(query_id, 3.0) for query_id in query_ids]
        all_query_ids += query_ids
    assert sorted(all_query_ids) == sorted(QUERY_IDS.tolist())


def test_wrong_lines_and_parts_are_refused(triplets, tmp_path):
    run = tmp_path / "run"
    run.write_text("q0 Q0 d0 1 2.0 x\nq0 Q0 d0 2 1.0 x")
    context, one = cut(triplets, tmp_path / "work", run), pa.table({"query_id": ["q0"], "positive": ["d1"]})
    (number,) = bucket_of(one["query_id"], PARTS).tolist()
    with pytest.raises(DataError, match=r"mine\.runs: document 'd0' is twice in query 'q0': keep one"):
        read_runs(number, one, context)
    with pytest.raises(ArtifactError, match="queries in other parts"):
        read_runs((number + 1) % PARTS, one, context)
    run.write_text("q0 Q0 d0 1 nan x")
    with pytest.raises(DataError, match="run, line 1: 'nan' is not a number"):
        cut(triplets, tmp_path / "other", run)
