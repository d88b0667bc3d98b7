import copy
import re

import pytest

from scalingnote.errors import DataError
from scalingnote.evaluate.page import markdown, page
from scalingnote.evaluate.report import comparison_table, measures_of, merge_reports
from scalingnote.evaluate.test_set import ExampleQuery, ResultDocument

REPORT = {
    "dataset": "shop",
    "num_documents": 1200,
    "num_queries": 40,
    "simulated_clicks": True,
    "methods": {
        "scalingdual": {"R@1": 0.5, "R@10": 0.9, "MRR@10": 0.6, "nDCG@10": 0.7},
        "scalingdual (index)": {"R@1": 0.45, "R@10": 0.85, "MRR@10": 0.55, "nDCG@10": 0.65},
        "bm25": {"R@1": 0.3, "R@10": 0.95, "MRR@10": 0.4, "nDCG@10": 0.5},
    },
    "index": {"recall@10": 0.93, "recall@100": 0.91, "bytes_per_vector": 20.5},
    "significance": {
        "baseline": "scalingdual",
        "alpha": 0.05,
        "resamples": 1000,
        "differences": {
            "bm25": {
                "R@1": {"difference": -0.2, "low": -0.3, "high": -0.1, "p": 0.0001, "p_holm": 0.0002},
                "R@10": {"difference": 0.05, "low": 0.01, "high": 0.09, "p": 0.02, "p_holm": 0.04},
                "MRR@10": {"difference": 0.0, "low": 0.0, "high": 0.0, "p": None, "p_holm": None},
                "nDCG@10": {"difference": -0.2, "low": -0.4, "high": 0.1, "p": 0.05, "p_holm": 0.1},
            }
        },
    },
    "seconds": {"prepare": 1.5, "train": 62.25},
    "usage": {
        "train": {
            "requests": 1200,
            "bytes_read": 6_225_000_000,
            "bytes_written": 0,
            "driver_peak_bytes": 500_000_000,
            "worker_peak_bytes": 2_000_000_000,
        }
    },
    "environment": {"cpus": 2, "torch": "2.13.0"},
}


def other(name, r1):
    report = copy.deepcopy(REPORT)
    rows = report["methods"]
    rows[name] = {**rows.pop("scalingdual"), "R@1": r1}
    rows[f"{name} (index)"] = rows.pop("scalingdual (index)")
    return report


def test_table_lines_up_and_marks_the_best():
    lines = comparison_table(merge_reports([REPORT])).splitlines()
    assert lines[0] == "shop: 1,200 documents, 40 queries"
    table = [line for line in lines if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:5]] == [
        "scalingdual",
        "scalingdual (index)",
        "bm25",
    ]
    assert "**0.950**" in table[4]
    assert "**0.500**" in table[2]
    assert len({len(line) for line in table[:5]}) == 1
    assert "0.930" in table[7]
    assert "simulated" in lines[-1]


def test_what_is_significant_is_marked():
    row = next(line for line in comparison_table(merge_reports([REPORT])).splitlines() if "bm25" in line)
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["0.300▼", "**0.950**▲", "0.400", "0.500"]
    text = markdown(REPORT)
    assert "## Against scalingdual" in text
    assert "-0.200 [-0.300, -0.100], p < 0.001 ▼" in text
    html = page(REPORT, examples=[], ancestors=[])
    assert "0.300▼</td>" in html
    assert "<h2>Against scalingdual</h2>" in html


def test_measures_are_in_the_order_of_their_depth():
    row = dict.fromkeys(["MRR@10", "R@1", "R@10", "R@100", "R@50", "nDCG@10"], 0.5)
    assert measures_of({"a": row}) == ["R@1", "R@10", "R@50", "R@100", "MRR@10", "nDCG@10"]


def test_merge_is_a_union_under_the_served_towers():
    merged = merge_reports([REPORT, other("scalingnote", 0.4)])
    assert list(merged["methods"]) == [
        "scalingdual",
        "scalingdual (index)",
        "bm25",
        "scalingnote",
        "scalingnote (index)",
    ]
    assert set(merged["index"]) == set(merged["seconds"]) == {"scalingdual", "scalingnote"}


def test_merge_keeps_both_of_a_name_with_two_results():
    merged = merge_reports([REPORT, other("scalingdual", 0.4)])
    assert merged["methods"]["scalingdual"]["R@1"] == 0.5
    assert merged["methods"]["scalingdual #2"]["R@1"] == 0.4


def test_merge_refuses_other_data():
    different = {**REPORT, "num_documents": 7}
    with pytest.raises(DataError, match="num_documents: 1200 and 7"):
        merge_reports([REPORT, different])
    with pytest.raises(DataError, match="no reports"):
        merge_reports([])


def test_markdown_tells_times_and_environment():
    text = markdown(REPORT)
    assert (
        "| train   |    62.2 |    1,200 |     100.0 |          0.0 |         0.50 |           2.00 |" in text
    )
    assert "torch 2.13.0" in text
    assert "Success@K" in text


def test_page_escapes_data_and_needs_nothing_else():
    report = {**REPORT, "dataset": "<script>alert(1)</script>"}
    example = ExampleQuery(
        "a < b",
        {"bm25": [ResultDocument("d&1", "T<i>tle", relevant=True), ResultDocument("d2", "", relevant=False)]},
    )
    html = page(report, examples=[example], ancestors=[])
    assert "<script" not in html
    assert "a &lt; b" in html
    assert "T&lt;i&gt;tle" in html
    assert html.count("<svg") == 3
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', html)) <= set(ids)
    assert "currentColor" in html
    assert "http" not in html
    assert html == page(report, examples=[example], ancestors=[])


def test_sections_are_in_markdown_and_on_the_page():
    rows = {name: {**row, "Recall@10": 0.25} for name, row in REPORT["methods"].items()}
    part = [
        {"label": "as written", "queries": 40, "methods": rows},
        {"label": "with <typos>", "queries": 40, "methods": rows},
    ]
    splits = {"train": {"queries": 9, "mean": 0.25, "bound": 0.5, "cosine": 0.9, "mean_as_given": 3.0}}
    pairs = {
        "split": "train",
        "pairs": 3,
        "mean": 0.0,
        "deviation": 0.1,
        "counts": [1, 2],
        "edges": [-1, 0, 1],
    }
    report = {**REPORT, "methods": rows, "slices": {"typos": part}}
    report["distance"] = {"splits": splits, "discrepancy": pairs}
    text, html = markdown(report), page(report, examples=[], ancestors=[])
    assert "Recall@10" not in comparison_table(merge_reports([report]))
    for title in ("Recall", "Against scalingdual", "With typos", "Distance from the teacher"):
        assert f"## {title}\n" in text
        assert f"<h2>{title}</h2>" in html
    assert "| with <typos> |      40 |       0.700 |" in text
    assert "with &lt;typos&gt;" in html
    assert 'aria-label="discrepancy of pairwise distances"' in html


def test_a_method_may_have_any_name():
    names = ["cost $x_{$", "_mine", "$a$ or $b$", r"back\$lash"]
    html = page(
        {**REPORT, "methods": dict.fromkeys(names, REPORT["methods"]["bm25"])}, examples=[], ancestors=[]
    )
    for name in names:
        assert html.count(f">{name}<") == 2  # in the table and beside the bars


def test_the_page_says_why_an_example_is_shown_and_where_its_first_relevant_document_stands():
    hits = {"scalingdual": [ResultDocument("d1", "one", relevant=True)], "bm25": []}
    ranks = {"scalingdual": 1, "bm25": None}
    html = page(REPORT, examples=[ExampleQuery("a query", hits, ranks, "bm25", -0.25)], ancestors=[])
    assert "Where a method differs most from scalingdual by nDCG@10" in html
    assert "Drawn at random;" not in html
    assert 'a query <span class="small">bm25 -0.250 nDCG@10</span></summary>' in html
    assert "<h4>scalingdual · first relevant: 1</h4>" in html
    assert "<h4>bm25 · first relevant: not found</h4>" in html


def test_the_page_opens_with_quality_against_cost():
    html = page({**REPORT, "queries_per_core_second": {"scalingdual": 250.0}}, examples=[], ancestors=[])
    first = html.split("<section>")[1]
    assert "<h2>Quality and cost</h2>" in first
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', first)
    assert len(places) == 2  # exact and through the index; BM25 encodes nothing
    assert len({x for x, _ in places}) == 1  # of one tower
    assert float(places[0][1]) < float(places[1][1])  # nDCG@10 0.7 is above 0.65
    assert first.count("stroke-dasharray") == 1
    for label in (
        "scalingdual: 0.700",
        "scalingdual (index): 0.650",
        "bm25: 0.500",
        "<text",
        ">100<",
        ">1,000<",
    ):
        assert label in first
    assert "Quality and cost" not in page(REPORT, examples=[], ancestors=[])


@pytest.mark.parametrize("suffix", [" (sparse)", " (hybrid)", " (raw hybrid)", " + bm25"])
def test_every_method_of_a_tower_costs_what_its_encoder_costs(suffix: str):
    methods = REPORT["methods"] | {f"scalingdual{suffix}": REPORT["methods"]["scalingdual"]}
    report = {**REPORT, "methods": methods, "queries_per_core_second": {"scalingdual": 250.0}}
    first = page(report, examples=[], ancestors=[]).split("<section>")[1]
    assert (first.count("<circle"), first.count("stroke-dasharray")) == (3, 1)
