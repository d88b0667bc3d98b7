import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core.errors import DataError
from scalingnote.evaluate.measures import measure
from scalingnote.storage import trec
from trec_files import read_qrels, read_run


def best_first(scores: dict[str, float]) -> list[tuple[str, float]]:
    """Sort without equal scores, because all of them except the first are written a little lower."""
    once = {score: doc for doc, score in scores.items()}
    return [(once[score], score) for score in sorted(once, reverse=True)]


IDS = st.text(min_size=1, max_size=6).filter(lambda text: text.isprintable() or text.isspace())


def test_lines_are_what_trec_eval_reads(tmp_path):
    trec.write_qrels(str(tmp_path / "qrels"), {"q1": {"d1": 2, "d2": 0}})
    trec.write_run(str(tmp_path / "run"), {"q1": [("d2", 0.5), ("d 1", 0.25)]}, tag="bm25")
    assert (tmp_path / "qrels").read_text() == "q1 0 d1 2\nq1 0 d2 0\n"
    assert (tmp_path / "run").read_text() == "q1 Q0 d2 1 0.5 bm25\nq1 Q0 %:d%201 2 0.25 bm25\n"


@given(
    st.dictionaries(IDS, st.dictionaries(IDS, st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    st.dictionaries(
        IDS,
        st.dictionaries(IDS, st.floats(-9, 9, width=32), min_size=1, max_size=4).map(best_first),
        max_size=4,
    ),
)
def test_written_files_are_read_back(tmp_path_factory, qrels, run):
    folder = tmp_path_factory.mktemp("trec")
    trec.write_qrels(str(folder / "qrels"), qrels)
    trec.write_run(str(folder / "run"), run, tag="a tag")
    assert read_qrels(str(folder / "qrels")) == qrels
    actual = read_run(str(folder / "run"))
    assert list(actual) == sorted(run)
    for query_id, results in run.items():
        assert [doc for doc, _ in actual[query_id]] == [doc for doc, _ in results]
        assert [s for _, s in actual[query_id]] == pytest.approx([s for _, s in results], rel=1e-8)


def test_a_broken_line_is_an_error_with_its_number(tmp_path):
    (tmp_path / "run").write_text("q Q0 d 1 0.5 tag\nq Q0 d 2\n")
    with pytest.raises(DataError, match="line 2: 4 columns"):
        read_run(str(tmp_path / "run"))
    with pytest.raises(DataError, match="empty id"):
        trec.write_qrels(str(tmp_path / "qrels"), {"": {"d": 1}})


@given(st.lists(st.sampled_from([2.5, 0.0, -0.0, 0.1, 0.1 + 1e-12, 1e-40, -7.0]), min_size=1, max_size=9))
def test_results_keep_their_order_and_distinct_scores(tmp_path_factory, scores):
    uri = str(tmp_path_factory.mktemp("trec") / "run")
    results = [(f"d{number}", score) for number, score in enumerate(scores)]
    trec.write_run(uri, {"q": results}, tag="x")
    results_read = read_run(uri)["q"]
    assert [doc for doc, _ in results_read] == [doc for doc, _ in results]
    scores_read = np.array([score for _, score in results_read], np.float32)  # the values in trec_eval
    assert (scores_read[1:] < scores_read[:-1]).all()
    lowest = np.inf
    for (_, score), (_, score_read) in zip(results, results_read, strict=True):
        if np.float32(score) < np.float32(lowest):
            assert score_read == pytest.approx(score, rel=1e-8)
        else:
            assert np.float32(score_read) == np.nextafter(np.float32(lowest), np.float32(-np.inf))
        lowest = score_read


def test_ir_measures_gives_the_same_measures(tmp_path):
    """Equal scores: trec_eval orders them by document id, and d2 would come before d1."""
    run = {"q1": [("d1", 0.5), ("d2", 0.5), ("d0", 0.5)], "q2": [("d3", 1.0), ("d9", 1.0 - 1e-12)]}
    qrels = {"q1": {"d1": 2, "d0": 1}, "q2": {"d9": 1}}
    trec.write_run(str(tmp_path / "run"), run, tag="x")
    trec.write_qrels(str(tmp_path / "qrels"), qrels)
    names = {"nDCG@10": "nDCG@10", "MRR@10": "RR@10", "MAP@100": "AP@100", "R@1": "Success@1"}
    theirs = ir_measures.calc_aggregate(
        [ir_measures.parse_measure(name) for name in names.values()],
        list(ir_measures.read_trec_qrels(str(tmp_path / "qrels"))),
        list(ir_measures.read_trec_run(str(tmp_path / "run"))),
    )
    ours = measure({q: [doc for doc, _ in results] for q, results in run.items()}, qrels, recall_at=(1, 2))
    assert {str(name): value for name, value in theirs.items()} == pytest.approx(
        {theirs_name: ours[name] for name, theirs_name in names.items()}
    )


def test_scores_order_a_run_and_not_ranks(tmp_path):
    (tmp_path / "run").write_text("q Q0 a 1 0.1 x\nq Q0 b 2 0.9 x\nq Q0 d 4 0.5 x\nq Q0 c 3 0.5 x\n")
    assert read_run(str(tmp_path / "run")) == {"q": [("b", 0.9), ("c", 0.5), ("d", 0.5), ("a", 0.1)]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("q Q0 a 1 2 x\nq Q0 b 2 1 x\nq Q0 a 3 0 x\n", "run: document 'a' is twice in query 'q'"),
        ("q Q0 a 1 2 x\nq Q0 b 2 nan x\n", "line 2: 'nan' is not a number"),
    ],
)
def test_a_run_without_an_order_is_an_error(tmp_path, lines, message):
    (tmp_path / "run").write_text(lines)
    with pytest.raises(DataError, match=message):
        read_run(str(tmp_path / "run"))
    with pytest.raises(DataError, match="document 'a' of query 'q' has the score NaN"):
        trec.write_run(str(tmp_path / "run"), {"q": [("a", float("nan"))]}, tag="x")


def test_ids_of_other_tools_are_read_unchanged(tmp_path):
    (tmp_path / "qrels").write_text("\ufeff1 0 http://x/a%20b 1\r\n1 0 50% 2.0\r\n")
    assert read_qrels(str(tmp_path / "qrels")) == {"1": {"http://x/a%20b": 1, "50%": 2}}
    trec.write_qrels(str(tmp_path / "ours"), {"1": {"http://x/a%20b": 1, "%:a": 1, "a b%20": 1}})
    assert (tmp_path / "ours").read_text() == "1 0 http://x/a%20b 1\n1 0 %:%25:a 1\n1 0 %:a%20b%2520 1\n"
    assert read_qrels(str(tmp_path / "ours")) == {"1": {"http://x/a%20b": 1, "%:a": 1, "a b%20": 1}}


@pytest.mark.parametrize("grade", ["0.5", "inf", "nan", "yes"])
def test_a_grade_that_is_not_whole_is_an_error(tmp_path, grade):
    (tmp_path / "qrels").write_text(f"q 0 a 1\nq 0 b {grade}\n")
    with pytest.raises(DataError, match=rf"qrels, line 2: '{grade}' is "):
        read_qrels(str(tmp_path / "qrels"))
