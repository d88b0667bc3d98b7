"""Run files are cut by the parts of triplets: a part's task reads the lines of its own queries."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import tiny
from scalingnote.core.errors import DataError
from scalingnote.datasets import input_files
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.triplets.mine.config import MineConfig
from scalingnote.triplets.mine.job import cut_runs, read_runs
from scalingnote.triplets.mine.search import MineContext

PARTS = (["q0", "q1", "q1"], ["q2"], ["q3", "q0", "q9"])  # q0 is in two, q9 in no run file


@pytest.fixture
def triplets(tmp_path) -> Artifact:
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    for number, query_ids in enumerate(PARTS):
        table = pa.table({"query_id": query_ids, "positive": ["d1"] * len(query_ids)})
        draft.write_table(f"triplets/part-{number:05d}.parquet", table)
    return draft.commit(counts={})


def context(triplets: Artifact, folder: Path, *runs: Path, held_out: Sequence[str] = ()) -> MineContext:
    return MineContext(
        folder=str(folder),
        buckets=len(PARTS),
        config=MineConfig(runs=tuple(map(str, runs))),
        triplets=triplets,
        embeddings=triplets,  # not read
        held_out=pa.array(held_out, pa.string()),
        output="",
    )


def test_a_part_reads_the_lines_of_its_own_queries(triplets, tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "SLICE_BYTES", 64)  # two or three lines
    first = {f"q{i}": [("d0", 4.0), ("d1", 3.0), ("out", 2.5), ("d2", 2.0)] for i in range(6)}
    trec.write_run(str(tmp_path / "first"), first, tag="a")
    trec.write_run(str(tmp_path / "second"), {"q1": [("d7", 9.0), ("d8", 8.0)]}, tag="b")
    runs = [tmp_path / "first", tmp_path / "second"]
    asked = context(triplets, tmp_path / "work", *runs, held_out=["out"])
    cut_runs(asked, each=lambda task, items: map(task, reversed(items)))
    cut_runs(asked, each=lambda *_: pytest.fail("finished tasks are not repeated"))
    of_first = [("d0", 4.0), ("d1", 3.0), ("d2", 2.0)]
    names = triplets.names("triplets/", ".parquet")
    for number, (name, query_ids) in enumerate(zip(names, PARTS, strict=True)):
        rows, found, scores = read_runs(number, triplets.table(name), asked)
        assert rows.tolist() == [*range(len(query_ids))]
        assert found.keys() == {*query_ids} - {"q9"}
        for query_id in found:  # of a query in both files the last one counts
            assert found[query_id] == ([("d7", 9.0), ("d8", 8.0)] if query_id == "q1" else of_first)
        expected = {"q1": 8.0, "q9": None}  # below the end of a run: at most its last score
        assert scores == [expected.get(query_id, 3.0) for query_id in query_ids]


def test_a_document_that_is_there_twice_is_refused(triplets, tmp_path):
    lines = ["q0 Q0 d0 1 2.0 x", "q0 Q0 d0 2 1.0 x"]
    (tmp_path / "run").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"mine\.runs: document 'd0' stands twice in query 'q0': keep one"):
        cut_runs(context(triplets, tmp_path / "work", tmp_path / "run"), each=map)
    (tmp_path / "run").write_text("q0 Q0 d0 1 nan x")
    with pytest.raises(DataError, match="run, line 1: 'nan' is not a number"):
        cut_runs(context(triplets, tmp_path / "other", tmp_path / "run"), each=map)
