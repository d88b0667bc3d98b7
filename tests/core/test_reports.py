"""Tables keep their columns for any content of a cell; templates escape values and define every name."""

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


def test_a_markdown_table_is_aligned_and_cells_are_escaped():
    table = ReportTable(["a|b", "n"], [["c\nd", StrongCell("7")], [CodeCell("x|y"), "1,000"]])
    assert table.markdown.splitlines() == [
        "| a\\|b   |     n |",
        "| :----- | ----: |",
        "| c d    | **7** |",
        "| `x\\|y` | 1,000 |",
    ]


def test_values_are_escaped_in_html():
    html = render("report.html", page=PAGE)
    assert "<b>" not in html
    assert html.count("&lt;b&gt;|\nx") == 7  # twice in the title, and five more times
    assert "<strong>&lt;1&gt;</strong>" in html
    assert "<figure><svg></svg></figure>" in html


def test_markdown_omits_a_section_of_pictures():
    text = render("report.md", page=PAGE)
    assert "> **<b>|" in text
    assert "## Numbers" in text
    assert "Drawn" not in text
    assert "\n\n\n" not in text
