import copy
import re

import pytest
from matplotlib.figure import Figure

from scalingnote.core.errors import DataError
from scalingnote.core.reports import markdown_text, render
from scalingnote.evaluate import pictures
from scalingnote.evaluate.merge import comparison, merge_reports
from scalingnote.evaluate.report import measures_of, report_page

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


def written(template, report):
    return render(template, page=report_page(report, []))


def compared(report):
    return markdown_text(comparison(merge_reports([report])))


def other(name, r1):
    report = copy.deepcopy(REPORT)
    rows = report["methods"]
    rows[name] = {**rows.pop("scalingdual"), "R@1": r1}
    rows[f"{name} (index)"] = rows.pop("scalingdual (index)")
    return report


def test_table_lines_up_and_marks_the_best():
    lines = compared(REPORT).splitlines()
    assert lines[0] == "shop: 1,200 documents, 40 queries"
    table = [line for line in lines if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:5]] == [
        "scalingdual",
        "scalingdual (index)",
        "bm25",
    ]
    assert "**0.950▲**" in table[4]
    assert "**0.500**" in table[2]
    assert len({len(line) for line in table[:5]}) == 1
    assert "0.930" in table[7]
    assert "simulated" in lines[-1]


def test_what_is_significant_is_marked():
    row = next(line for line in compared(REPORT).splitlines() if "bm25" in line)
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["0.300▼", "**0.950▲**", "0.400", "0.500"]
    text = written("report.md", REPORT)
    assert "## Against scalingdual" in text
    assert "-0.200 [-0.300, -0.100], p < 0.001 ▼" in text
    html = written("report.html", REPORT)
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
    text = written("report.md", REPORT)
    assert (
        "| train   |    62.2 |    1,200 |     100.0 |          0.0 |         0.50 |           2.00 |" in text
    )
    assert "torch 2.13.0" in text
    assert "Success@K" in text


def test_page_escapes_data_and_needs_nothing_else():
    report = {**REPORT, "dataset": "<script>alert(1)</script>"}
    report["queries_per_core_second"] = {"scalingdual": 250.0}
    report["methods"] = report["methods"] | {"a < b": REPORT["methods"]["bm25"]}
    html = written("report.html", report)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "a < b" not in html
    assert html.count(">a &lt; b<") == 3  # in both tables and beside the bars
    assert html.count("<svg") == 2
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', html)) <= set(ids)
    assert "currentColor" in html
    assert "http" not in html
    assert html == written("report.html", report)


def test_sections_are_in_markdown_and_on_the_page():
    rows = {name: {**row, "Recall@10": 0.25} for name, row in REPORT["methods"].items()}
    part = [
        {"label": "as written", "queries": 40, "methods": rows},
        {"label": "with <typos>", "queries": 40, "methods": rows},
    ]
    splits = {"train": {"queries": 9, "mean": 0.25, "bound": 0.5, "cosine": 0.9, "mean_as_given": 3.0}}
    report = {**REPORT, "methods": rows, "slices": {"typos": part}}
    report["distance"] = {"splits": splits}
    text, html = written("report.md", report), written("report.html", report)
    assert "Recall@10" not in compared(report)
    for title in ("Recall", "Against scalingdual", "With typos", "Distance from the teacher"):
        assert f"## {title}\n" in text
        assert f"<h2>{title}</h2>" in html
    assert "| with <typos> |      40 |       0.700 |" in text
    assert "with &lt;typos&gt;" in html


def test_a_method_may_have_any_name():
    names = ["cost $x_{$", "_mine", "$a$ or $b$", r"back\$lash"]
    html = written("report.html", {**REPORT, "methods": dict.fromkeys(names, REPORT["methods"]["bm25"])})
    picture = html.split("<svg")[1].split("</svg>")[0]
    for name in names:
        assert picture.count(f">{name}</text>") == 1
        assert f">{name}</th>" in html


def test_the_page_opens_with_quality_against_cost():
    html = written("report.html", {**REPORT, "queries_per_core_second": {"scalingdual": 250.0}})
    first = html.split("<section>")[1]
    assert "<h2>Quality and cost</h2>" in first
    assert 'aria-label="quality and cost of the methods"' in first
    for label in ("scalingdual: 0.700", "scalingdual (index): 0.650", "bm25: 0.500"):
        assert f">{label}</text>" in first
    for tick in ("100", "1,000"):
        assert f">{tick}</text>" in first
    assert "Quality and cost" not in written("report.html", REPORT)


def test_methods_stand_at_their_cost_and_quality():
    axes = Figure().subplots()
    points = {"dual": (250.0, 0.7), "small": (9000.0, 0.6), "bm25": (None, 0.5)}
    pictures.draw_quality_and_cost(axes, points, measure="nDCG@10")
    assert [tuple(dots.get_offsets()[0]) for dots in axes.collections] == [(250, 0.7), (9000, 0.6)]
    (line,) = axes.lines  # BM25 encodes nothing
    assert ({*line.get_ydata()}, line.get_linestyle()) == ({0.5}, "--")
    assert axes.get_xscale() == "log"


def test_bars_have_the_heights_of_their_values():
    axes = Figure().subplots()
    pictures.draw_groups(axes, {"R@1": [0.5, 0.3], "R@10": [0.9, 0.8]}, ["dual", "bm25"])
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.9, 0.3, 0.8]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["R@1", "R@10"]


@pytest.mark.parametrize("suffix", [" (sparse)", " (hybrid)", " (raw hybrid)", " + bm25"])
def test_every_method_of_a_tower_costs_what_its_encoder_costs(suffix: str):
    methods = REPORT["methods"] | {f"scalingdual{suffix}": REPORT["methods"]["scalingdual"]}
    report = {**REPORT, "methods": methods, "queries_per_core_second": {"scalingdual": 250.0}}
    (table,) = report_page(report, []).sections[0].tables
    assert {row[0]: row[1] for row in table.rows} == dict.fromkeys(methods, "250") | {"bm25": "–"}
