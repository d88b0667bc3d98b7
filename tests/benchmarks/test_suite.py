"""Running benchmarks one after the other: what is run, what is skipped, what a failure leaves."""

import inspect
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import report, suite, trials
from benchmarks.sizes import BENCHMARKS, Benchmark

ONE, TWO = (Benchmark(name, "--small 1", 2, "", 20) for name in ("one", "two"))
WRITES = "import json, sys; json.dump({'metrics': {}}, open(sys.argv[1], 'w'))"


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch):
    """Programs that stand in for benchmarks of these names; each gets the path of its result."""

    def put(**programs: str) -> None:
        def commands(benchmark: Benchmark, result: Path, *_: object) -> list[list[str]]:
            return [[sys.executable, "-c", programs[benchmark.name], str(result)]]

        monkeypatch.setattr(suite, "commands", commands)

    return put


def test_repeats_go_round_after_round():
    paths = [run.path.name for run in suite.plan([ONE, TWO], Path("x"), repeat=2)]
    assert paths == ["one.1.json", "two.1.json", "one.2.json", "two.2.json"]
    assert [run.path.name for run in suite.plan([ONE, TWO], Path("x"), repeat=1)] == ["one.json", "two.json"]


def test_a_commit_and_the_one_it_is_measured_against_take_turns(tmp_path: Path, run_as):
    new = suite.plan([ONE, TWO], tmp_path / "new", repeat=2)
    old = suite.plan([ONE], tmp_path / "old", repeat=2, tree=tmp_path)
    runs = suite.in_turns(old, new)
    sides = [f"{run.path.parent.name}/{run.path.stem}" for run in runs]
    assert sides == ["old/one.1", "new/one.1", "new/two.1", "new/one.2", "old/one.2", "new/two.2"]
    where = "import json, os, sys; json.dump({'metrics': {}, 'at': [os.getcwd(), os.environ['PYTHONPATH']]}"
    run_as(one=f"{where}, open(sys.argv[1], 'w'))", two=WRITES)
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    assert suite.run_all(runs, "small") == []
    for folder, tree in (("old", tmp_path), ("new", suite.HERE)):
        assert json.loads((tmp_path / folder / "one.1.json").read_text())["at"] == [str(tree)] * 2


def test_what_is_left_is_told_by_the_speed_of_this_machine():
    runs = suite.plan([ONE, TWO], Path("x"), repeat=1)
    assert suite.remaining(runs, "small", expected=0, taken=0) == 4
    assert suite.remaining(runs, "full", expected=0, taken=0) == 40
    assert suite.remaining(runs[1:], "small", expected=2, taken=6) == 6  # three times as slow as the table


def test_one_that_fails_stops_no_other_and_leaves_no_result(tmp_path: Path, run_as):
    run_as(one="import sys; open(sys.argv[1], 'w').write('{'); print('why'); sys.exit(3)", two=WRITES)
    runs = suite.plan([ONE, TWO], tmp_path, repeat=1)
    assert [run.benchmark.name for run in suite.run_all(runs, "small")] == ["one"]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["two.json"]
    assert (tmp_path / "one.log").read_text() == "why\n"
    # Started again, it runs what is missing, and that alone.
    assert [run.benchmark.name for run in runs if not run.path.exists()] == ["one"]


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, run_as, monkeypatch):
    late = tmp_path / "late"
    child = f"import time; time.sleep(1.5); open({str(late)!r}, 'w')"
    run_as(one=f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    monkeypatch.setattr(suite, "PATIENCE", 0)  # the least wait is a second
    assert len(suite.run_all(suite.plan([ONE], tmp_path, repeat=1), "small")) == 1
    time.sleep(1)
    assert not late.exists()


def test_small_runs_are_never_what_documents_quote(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("sys.argv", ["suite", "--commit-results"])
    with pytest.raises(SystemExit):
        suite.main()
    assert "the documents quote those sizes" in capsys.readouterr().err


def test_results_are_kept_with_their_plots_and_of_several_runs_the_first(tmp_path: Path, monkeypatch):
    folder, results = tmp_path / "run", tmp_path / "results"
    for path in (folder, results):
        path.mkdir()
    (folder / "1").mkdir()
    for name in ("one.1.json", "one.2.json", "1/one.png", "1/one_more.png", "1/another.png"):
        (folder / name).write_text(name)
    there, new, again = (
        json.dumps({"trial": name, "seconds": s}) for name, s in (("a", 1), ("b", 2), ("a", 3))
    )
    (results / "trials.jsonl").write_text(f"{there}\n")
    (folder / "1" / "trials.jsonl").write_text(f"{new}\n{again}\n")
    monkeypatch.setattr(suite, "RESULTS", results)
    made = replace(ONE, full="--plot {folder}/one.png --trials {folder}/trials.jsonl")
    suite.keep(suite.plan([made, TWO], folder, repeat=2))
    assert {path.name: path.read_text() for path in results.iterdir()} == {
        "one.json": "one.1.json",
        "one.png": "1/one.png",
        "one_more.png": "1/one_more.png",
        "trials.jsonl": f"{again}\n{new}\n",
    }


def test_every_round_trains_in_a_folder_of_its_own(tmp_path: Path, run_as, monkeypatch):
    told: list[Path] = []

    def commands(benchmark: Benchmark, result: Path, folder: Path, size: str) -> list[list[str]]:
        told.append(folder)
        return [[sys.executable, "-c", WRITES, str(result)]]

    monkeypatch.setattr(suite, "commands", commands)
    assert suite.run_all(suite.plan([ONE], tmp_path, repeat=2), "small") == []
    assert suite.run_all(suite.plan([ONE], tmp_path, repeat=1), "small") == []
    assert told == [tmp_path / "1", tmp_path / "2", tmp_path]


def test_a_machine_that_can_run_none_of_them_says_so(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["suite", "--only", "gpu"])
    monkeypatch.setattr(suite, "BUILD", tmp_path)
    monkeypatch.setattr(suite.shutil, "which", lambda _: None)
    monkeypatch.setattr(suite.performance, "update", lambda: None)
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 0
    assert "not run here: gpu: needs an NVIDIA GPU" in capsys.readouterr().out


def test_a_commit_is_not_measured_against_itself(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["suite", "--only", "train", "--against", "HEAD"])
    monkeypatch.setattr(suite, "BUILD", tmp_path)
    monkeypatch.setattr(suite, "commit", lambda: suite._git("describe", "--always", "HEAD").strip())
    monkeypatch.setattr(suite, "checkout", lambda _: tmp_path)
    with pytest.raises(SystemExit):
        suite.main()
    assert "--against HEAD is the commit that is checked out" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_every_argument_of_the_table_is_one_that_the_benchmark_knows(benchmark: Benchmark):
    source = Path(f"benchmarks/{benchmark.name}.py").read_text(encoding="utf-8")
    if "parser = given(" in source:  # the options of all benchmarks that are made of trials
        source += inspect.getsource(trials.given)
    for size in ("small", "full"):
        *_, command = suite.commands(benchmark, Path("r.json"), Path("build"), size)
        options = {word for word in command if word.startswith("--")} - {"--json"}
        assert all(f'"{option}"' in source for option in options), options


def test_the_whole_suite_takes_about_an_hour_and_a_half():
    assert 40 <= sum(benchmark.minutes for benchmark in BENCHMARKS if not benchmark.needs_gpu) <= 100


def test_a_commit_is_called_as_git_does_and_changes_of_code_are_part_of_its_name(tmp_path: Path, monkeypatch):
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(suite, "HERE", tmp_path)
    with pytest.raises(SystemExit, match="in a git checkout"):
        suite.commit()
    git("init")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/some.md"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = suite.commit()
    tree = suite.checkout("HEAD")
    (tree / "code.py").write_text("0")  # a checkout of its own
    assert ((tmp_path / "code.py").read_text(), suite.checkout("HEAD")) == ("1", tree)
    shutil.rmtree(tmp_path / "build")
    with pytest.raises(SystemExit, match="nowhere"):
        suite.checkout("nowhere")
    (tmp_path / "docs/some.md").write_text("2")  # what the suite itself writes
    assert suite.commit() == clean
    names = {clean}
    for name, text in (("code.py", "2"), ("code.py", "3"), ("new.py", "1"), ("new.py", "2")):
        (tmp_path / name).write_text(text)
        names.add(suite.commit())
    assert len(names) == 5
    assert all(name.startswith(clean) for name in names)


def test_a_result_names_its_command_without_where_it_was_written(tmp_path: Path, monkeypatch):
    words = "--rounds 2 --json x.json --set run_dir=build/abc --plot=a.png --set a.b=1 --folder f"
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/index.py", *words.split()])
    report.write(tmp_path / "r.json", metrics={})
    assert (
        json.loads((tmp_path / "r.json").read_text())["command"] is None
    )  # no benchmark was started: a test
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="benchmarks.index"))
    report.write(tmp_path / "r.json", metrics={})
    command = "python -m benchmarks.index --rounds 2 --set a.b=1"
    assert json.loads((tmp_path / "r.json").read_text())["command"] == command
    # Tables of trials that are finished are made again from where those are.
    monkeypatch.setattr("sys.argv", ["x", "--finished", "--trials", "t.jsonl", "--json", "x.json"])
    report.write(tmp_path / "r.json", metrics={})
    command = "python -m benchmarks.index --finished --trials t.jsonl"
    assert json.loads((tmp_path / "r.json").read_text())["command"] == command
