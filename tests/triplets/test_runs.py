"""Lines of run files go to the parts of triplets: a part's task reads those of its own queries."""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tiny
from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.datasets import input_files
from scalingnote.datasets.readers import find_trec_slices
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.shuffle import bucket_of, run_slices
from scalingnote.triplets.mine.config import MineConfig
from scalingnote.triplets.mine.job import read_runs, scatter_lines
from scalingnote.triplets.mine.search import MineContext

PARTS = 3
QUERY_IDS = np.array(["q0", "q1", "q1", "q2", "q3", "q9", "q4"])  # q9 is in no run file


@pytest.fixture
def triplets(tmp_path) -> Artifact:
    """Each query in the part that its hash says."""
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    part_of = bucket_of(pa.array(QUERY_IDS), PARTS)
    for number in range(PARTS):
        own = QUERY_IDS[part_of == number]
        table = pa.table({"query_id": pa.array(own, pa.string()), "positive": ["d1"] * len(own)})
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
    seen: list[str] = []
    for number, name in enumerate(triplets.names("triplets/", ".parquet")):
        table = triplets.table(name)
        query_ids = table["query_id"].to_pylist()
        rows, found, scores = read_runs(number, table, context)
        assert rows.tolist() == [*range(len(query_ids))]
        assert found.keys() == {*query_ids} - {"q9"}
        for query_id in found:  # of a query in both files the last one counts
            assert found[query_id] == ([("d7", 9.0), ("d8", 8.0)] if query_id == "q1" else of_first)
        expected = {"q1": 8.0, "q9": None}  # below the end of a run: at most its last score
        assert scores == [expected.get(query_id, 3.0) for query_id in query_ids]
        seen += query_ids
    assert sorted(seen) == sorted(QUERY_IDS.tolist())


def test_wrong_lines_and_parts_are_refused(triplets, tmp_path):
    run = tmp_path / "run"
    run.write_text("q0 Q0 d0 1 2.0 x\nq0 Q0 d0 2 1.0 x")
    context, one = cut(triplets, tmp_path / "work", run), pa.table({"query_id": ["q0"], "positive": ["d1"]})
    (number,) = bucket_of(one["query_id"], PARTS).tolist()
    with pytest.raises(DataError, match=r"mine\.runs: document 'd0' stands twice in query 'q0': keep one"):
        read_runs(number, one, context)
    with pytest.raises(ArtifactError, match="queries in other parts"):
        read_runs((number + 1) % PARTS, one, context)
    run.write_text("q0 Q0 d0 1 nan x")
    with pytest.raises(DataError, match="run, line 1: 'nan' is not a number"):
        cut(triplets, tmp_path / "other", run)
