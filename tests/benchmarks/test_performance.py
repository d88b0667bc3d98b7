"""The page of docs/performance.md and the results that it is made from."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import pages, performance, performance_plots
from benchmarks.line import judged, number
from benchmarks.sizes import BENCHMARKS

REPORTS = performance.read(performance.RESULTS)
PAGE = performance.PAGE.read_text(encoding="utf-8")


def test_the_pages_are_what_the_committed_results_give():
    assert performance.stale(REPORTS) == [], "run `python -m benchmarks.performance` and commit the pages"


def test_a_table_of_a_page_is_found_by_its_keys_and_made_anew():
    rows = [{"data": "medquad", "R@50": 0.5}, {"data": "medquad", "R@50": 1.0}]
    marked = "before\n<!-- table one.json: tables / all of it -->\n{}\n<!-- end of table -->\nafter\n"
    page = pages.filled(marked.format("| old |"), {"one": {"tables": {"all of it": rows}}})
    assert page == marked.format(
        "\n| data    | R@50 |\n| :------ | ---: |\n| medquad |  0.5 |\n|         |    1 |\n"
    )
    assert pages.filled(page, {}) == page
    with pytest.raises(SystemExit, match=r"one\.json has no 'all of it'"):
        pages.filled(page, {"one": {"tables": {}}})


def test_the_short_reading_counts_the_bars_as_the_page_does():
    reading = (performance.RESULTS / "README.md").read_text(encoding="utf-8")
    bars, _, missed = map(int, re.findall(r"(\d+) (?:lines have a bar|meet it|do not)", PAGE))
    assert f"where {missed} of {bars} bars are **not** met" in reading


def test_committed_results_are_read_to_the_end():
    assert "some lines of these results are missing" not in PAGE


def test_what_the_page_links_to_is_there():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert link.startswith("http") or (performance.PAGE.parent / link).exists(), link


def test_a_result_that_is_missing_is_a_row_with_the_command_that_makes_it():
    page = performance.content({})
    for benchmark in BENCHMARKS:
        assert f"not measured yet: `python -m benchmarks.{benchmark.name} " in page
    assert page.startswith("0 lines have a bar")
    assert page.count("not drawn yet") == len(performance_plots.PLOTS)


@pytest.mark.parametrize("name", sorted({*REPORTS} & {benchmark.name for benchmark in BENCHMARKS}))
def test_results_of_another_form_are_a_row_too(name: str):
    said = performance.lines(name, {"metrics": {}})
    assert "some lines of these results are missing" in said[-1].what


def test_every_benchmark_of_the_suite_has_its_place_on_the_page():
    named = [name for names in performance.PARTS.values() for name in names]
    assert sorted(named) == sorted(benchmark.name for benchmark in BENCHMARKS)


def test_a_bar_that_was_not_met_is_said():
    slow = json.loads(json.dumps(REPORTS["index"]))
    slow["metrics"] |= {"us_per_query_over_faiss_default": 1.4, "recall100_default": 0.9}
    bars = [line.bar for line in performance.lines("index", slow)]
    assert bars[:2] == ["≥ 0.95: **not met**", "≤ 1: **not met**"]
    assert "2 do not ([index](results/index.json))" in performance.content({"index": slow})
    assert judged(0, "zero", None) == "= 0: met"
    assert judged(2, "zero", None) == "= 0: **not met**"
    assert judged(2, "higher", None) == ""


def test_a_number_is_never_rounded_over_its_bar():
    assert [number(x) for x in (0.9989, 0.9995, 0.952, 1.0, 0.0, 12345.6)] == [
        *("0.9989", "0.9995", "0.952", "1", "0", "12,346"),
    ]


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(SystemExit, match="needs the lines"):
        performance.filled("# Performance\n", {})


def test_check_tells_a_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(performance, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["performance", "--check"])
    for text, status in ((PAGE, 0), (PAGE.replace("| Collecting |", "| Elsewhere |", 1), 1)):
        (tmp_path / "page.md").write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as ended:
            performance.main()
        assert int(ended.value.code) == status
        assert (tmp_path / "page.md").read_text(encoding="utf-8") == text


def test_plots_are_drawn_where_there_is_data_and_old_ones_are_removed(tmp_path: Path):
    rows = [
        {"query side": "scalingnote-1l", "queries/s": 900, "R@50": "0.940 ± 0.010"},
        {"query side": "bm25", "queries/s": "-", "R@50": "0.988 ± 0.000"},
    ]
    (tmp_path / "recall_latency.png").write_bytes(b"of results that are gone")
    reports = {"distillation": {"tables": {"medquad, scratch": rows}}}
    performance_plots.draw(reports, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quality_cost.png"]
    assert "results/quality_cost.png" in performance_plots.markdown(reports)
