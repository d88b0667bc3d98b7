"""Running, comparing and reporting benchmarks."""

import inspect
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import compare, performance, report, suite, trials

WRITES = "import json, sys; json.dump({'metrics': {}}, open(sys.argv[1], 'w'))"


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces benchmarks by programs; each gets the path of its result."""

    def put(**programs: str) -> None:
        def commands(name: str, result: Path, shared: Path) -> list[list[str]]:
            return [[sys.executable, "-c", programs[name], str(result)]]

        monkeypatch.setattr(suite, "commands", commands)

    return put


def test_a_failure_stops_no_other_and_an_interrupted_suite_continues(tmp_path: Path, run_as):
    run_as(one="import sys; open(sys.argv[1], 'w').write('{'); print('why'); sys.exit(3)", two=WRITES)
    assert suite.run_all(["one", "two"], tmp_path, repeat=2) == [tmp_path / f"one.{n}.json" for n in (1, 2)]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["two.1.json", "two.2.json"]
    assert (tmp_path / "one.1.log").read_text() == "why\n"
    run_as(one=WRITES, two="raise SystemExit(1)")  # has its results
    assert suite.run_all(["one", "two"], tmp_path, repeat=2) == []


def test_a_benchmark_that_hangs_is_killed_with_its_children(tmp_path: Path, run_as, monkeypatch):
    late = tmp_path / "late"
    child = f"import time; time.sleep(1.5); open({str(late)!r}, 'w')"
    run_as(one=f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    monkeypatch.setattr(suite, "TIMEOUT_S", 0.5)
    assert suite.run_all(["one"], tmp_path, repeat=1) == [tmp_path / "one.json"]
    time.sleep(1.5)
    assert not late.exists()


@pytest.mark.parametrize("name", suite.SMALL)
def test_every_argument_of_the_suite_is_an_option_of_its_benchmark(name: str):
    source = Path(f"benchmarks/{name}.py").read_text(encoding="utf-8")
    if "parser = trial_parser(" in source:
        source += inspect.getsource(trials.trial_parser)
    *_, command = suite.commands(name, Path("r.json"), Path("build"))
    options = {word for word in command if word.startswith("--")} - {"--json"}
    numbers = {f"--{name}" for name in re.findall(r"[(,] ?(\w+)=[\d_]+", source)}  # of `arguments`
    assert all(option in numbers or f'"{option}"' in source for option in options), options


def test_a_result_names_its_command(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--rounds", "2", "--json", "x.json", "--set", "a.b=1"])
    report.write(tmp_path / "r.json", metrics={})
    assert json.loads((tmp_path / "r.json").read_text())["command"] is None  # a test is not a benchmark
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="benchmarks.index"))
    report.write(tmp_path / "r.json", metrics={})
    command = "python -m benchmarks.index --rounds 2 --set a.b=1"
    assert json.loads((tmp_path / "r.json").read_text())["command"] == command


def run(*, command: str = "python -m benchmarks.x", **metrics: float) -> dict:
    return {"command": command, "metrics": metrics, "environment": {"system": "Linux", "cpus": 2}}


def test_a_comparison_shows_medians_ranges_and_the_change(tmp_path: Path, monkeypatch, capsys):
    old = [run(rate=value, same=1.0, gone=1.0) for value in (100, 101, 103)]
    new = [run(rate=value, same=1.0) for value in (50, 51, 52)]
    rows = {row["metric"]: row for row in compare.compare({"x": old}, {"x": new})}
    assert rows.keys() == {"rate", "same"}
    assert rows["rate"] == {
        "benchmark": "x",
        "metric": "rate",
        "old": "101 (100 to 103)",
        "new": "51 (50 to 52)",
        "change": "-49.5%",
        "apart": True,
    }
    assert not rows["same"]["apart"]
    (other,) = compare.compare({"x": old[:1]}, {"x": [run(command="other", rate=100)]})
    assert other["benchmark"] == "x*"
    for side, runs in (("old", old), ("new", new)):
        (tmp_path / side).mkdir()
        for number, one in enumerate(runs):
            (tmp_path / side / f"x.{number}.json").write_text(json.dumps(one))
    (tmp_path / "old" / "y.json").write_text(json.dumps(run(rate=1)))
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / "old"), str(tmp_path / "new")])
    compare.main()
    output = capsys.readouterr().out
    assert "-49.5%" in output
    assert "same" not in output
    assert f"not in {tmp_path / 'new'}: y" in output


def test_the_committed_pages_are_what_the_results_give():
    stale = [path for path, text in performance.pages(performance.read()) if text != path.read_text()]
    assert stale == [], "run `python -m benchmarks.performance` and commit the pages"


def test_every_benchmark_of_the_suite_is_on_the_page():
    assert suite.SMALL.keys() | {"gpu"} == performance.HEADLINES.keys()


def test_a_missed_bar_and_a_missing_result_are_named():
    name, (metric, (meaning, bar)) = "index", next(iter(performance.HEADLINES["index"].items()))
    metrics = dict.fromkeys(performance.HEADLINES[name], 0.5)
    page = performance.content({name: {"command": None, "metrics": metrics, "environment": {}}})
    assert f"| {meaning} | 0.5 | {bar}: **missed** |" in page
    assert page.startswith("3 metrics have a bar; 1 miss it.")
    assert "| train | not measured | | | `python -m benchmarks.train` | |" in page
    assert metric == "recall100_default"


@pytest.mark.parametrize(
    ("value", "bar", "met"), [(0, "= 0", True), (1, "= 0", False), (2, "<= 1", False), (1, ">= 1", True)]
)
def test_a_bar_is_met_or_not(value: float, bar: str, met: bool):
    assert performance.is_met(value, bar) == met


def test_a_number_is_never_rounded_over_its_bar():
    numbers = [performance.number(x) for x in (0.9989, 0.952, 1.0, 0.0, 12345.6)]
    assert numbers == ["0.9989", "0.952", "1", "0", "12,346"]


def test_a_table_of_a_page_is_renewed_by_its_keys(tmp_path: Path, monkeypatch):
    rows = [{"data": "medquad", "R@50": 0.5}, {"data": "medquad", "R@50": 1.0}]
    template = "before\n<!-- table one.json: tables / all -->\n{}\n<!-- end of table -->\nafter\n"
    page = tmp_path / "page.md"
    page.write_text(template.format("| old |"))
    monkeypatch.setattr(performance, "DOCS", tmp_path)
    ((path, text),) = performance.pages({"one": {"tables": {"all": rows}}})
    new = template.format(
        "\n| data    | R@50 |\n| :------ | ---: |\n| medquad |  0.5 |\n|         |    1 |\n"
    )
    assert (path, text) == (page, new)
    assert [text for _, text in performance.pages({})] == [page.read_text()]
    with pytest.raises(SystemExit, match=r"one\.json has no 'all'"):
        list(performance.pages({"one": {"tables": {}}}))
    with pytest.raises(SystemExit, match="needs the lines"):
        performance.fill_page("# Performance\n", {})
