"""The notebook of examples/, run from its first cell to its last with a small model."""

import json
import re
from pathlib import Path

import pytest

import scalingnote
from in_process import without_ray
from published import folder

NOTEBOOK = Path(scalingnote.__file__).parents[1] / "examples" / "your_model.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_every_cell_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All cells run in one process, like in a kernel; only the model and the number of texts differ."""
    without_ray(monkeypatch)
    monkeypatch.chdir(tmp_path)
    first, *others = CODE
    assert re.search(r"^MODEL = .*\nTEXTS = .*\nCOUNT = ", first, re.M)
    names: dict[str, object] = {}
    exec(first, names)
    names |= {"MODEL": str(folder(tmp_path / "published")), "COUNT": 400}
    for number, cell in enumerate(others, 2):
        exec(compile(cell, f"cell {number}", "exec"), names)
    output = capsys.readouterr().out
    assert int(re.findall(r"([\d,]+) documents", output)[0].replace(",", "")) > 1000
    assert len(re.findall(r"^\d\.\d{3}  \w", output, re.M)) == 3
    assert "the teacher's ten best documents that the table finds" in output
    ways = re.findall(r"^(.+?) +answers (\d) of 8 in the first ten", output, re.M)
    assert [way for way, _ in ways] == [
        "BM25",
        "table",
        "table + BM25",
        "table, 30 % by the teacher",
        "teacher",
        "teacher + BM25",
    ]
    assert int(dict(ways)["BM25"]) >= 3  # tables of a random model find no answers, BM25 does
    assert scalingnote.QueryEncoder("my-query-tower").encode("a").shape == (1, 32)
    assert Path("my-query-tower/modules.json").exists()


def test_every_document_that_answers_a_query_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in CODE[:2]:
        exec(cell, names)
    titles = {json.loads(line)["title"] for line in Path("docs.jsonl").read_text().splitlines()}
    judged = re.search(r"JUDGED = (\{.*?\n\})", "\n".join(CODE), re.S)
    assert judged is not None
    assert set(eval(judged[1]).values()) <= titles


def test_outputs_are_not_committed() -> None:
    assert len(CODE) >= 6
    for cell in CELLS:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        assert set(cell["metadata"]) <= {"tags"}
    identifiers = [cell["id"] for cell in CELLS]
    assert len(set(identifiers)) == len(identifiers)
