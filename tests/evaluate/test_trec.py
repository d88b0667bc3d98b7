import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.errors import DataError
from scalingnote.storage import trec

IDS = st.text(min_size=1, max_size=6).filter(lambda text: text.isprintable() or text.isspace())


def test_lines_are_what_trec_eval_reads(tmp_path):
    trec.write_qrels(str(tmp_path / "qrels"), {"q1": {"d1": 2, "d2": 0}})
    trec.write_run(str(tmp_path / "run"), {"q1": [("d2", 0.5), ("d 1", 0.25)]}, tag="bm25")
    assert (tmp_path / "qrels").read_text() == "q1 0 d1 2\nq1 0 d2 0\n"
    assert (tmp_path / "run").read_text() == "q1 Q0 d2 1 0.5 bm25\nq1 Q0 d%201 2 0.25 bm25\n"


@given(
    st.dictionaries(IDS, st.dictionaries(IDS, st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    st.dictionaries(
        IDS,
        st.lists(st.tuples(IDS, st.floats(-9, 9, width=32)), min_size=1, max_size=4),
        max_size=4,
    ),
)
def test_what_is_written_is_read(tmp_path_factory, qrels, run):
    folder = tmp_path_factory.mktemp("trec")
    trec.write_qrels(str(folder / "qrels"), qrels)
    trec.write_run(str(folder / "run"), run, tag="a tag")
    assert trec.read_qrels(str(folder / "qrels")) == qrels
    found = trec.read_run(str(folder / "run"))
    assert list(found) == list(run)
    for query_id, results in run.items():
        assert [doc for doc, _ in found[query_id]] == [doc for doc, _ in results]
        assert [s for _, s in found[query_id]] == pytest.approx([s for _, s in results], rel=1e-8)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "run").write_text("q Q0 d 1 0.5 tag\nq Q0 d 2\n")
    with pytest.raises(DataError, match="line 2: 4 columns"):
        trec.read_run(str(tmp_path / "run"))
    (tmp_path / "qrels").write_text("q 0 d yes\n")
    with pytest.raises(DataError, match="'yes' is not a number"):
        trec.read_qrels(str(tmp_path / "qrels"))
    with pytest.raises(DataError, match="empty id"):
        trec.write_qrels(str(tmp_path / "qrels"), {"": {"d": 1}})
