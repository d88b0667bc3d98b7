"""Tables keep their columns whatever a cell holds; templates escape and know every name."""

from scalingnote.core.reports import (
    CodeCell,
    ReportPage,
    ReportSection,
    ReportTable,
    StrongCell,
    render,
)

HOSTILE = "<b>|\nx"
PAGE = ReportPage(
    HOSTILE,
    [
        ReportSection("Numbers", HOSTILE, [ReportTable(["name", "n"], [[HOSTILE, StrongCell("<1>")]])]),
        ReportSection("Drawn", pictures=["<svg></svg>"]),
    ],
    summary=HOSTILE,
    warnings=[HOSTILE],
    notes=[HOSTILE],
)


def test_a_markdown_table_lines_up_and_no_cell_ends_it():
    table = ReportTable(["a|b", "n"], [["c\nd", StrongCell("7")], [CodeCell("x|y"), "1,000"]])
    assert table.markdown.splitlines() == [
        "| a\\|b   |     n |",
        "| :----- | ----: |",
        "| c d    | **7** |",
        "| `x\\|y` | 1,000 |",
    ]


def test_what_comes_from_data_is_escaped_on_a_page():
    html = render("report.html", page=PAGE)
    assert "<b>" not in html
    assert html.count("&lt;b&gt;|\nx") == 7  # twice in the title, and wherever else it stands
    assert "<strong>&lt;1&gt;</strong>" in html
    assert "<figure><svg></svg></figure>" in html


def test_markdown_leaves_out_a_section_of_pictures():
    text = render("report.md", page=PAGE)
    assert "> **<b>|" in text
    assert "## Numbers" in text
    assert "Drawn" not in text
    assert "\n\n\n" not in text
