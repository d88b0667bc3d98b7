"""What counts as better or worse between two commits."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.directions import RULES, rule

RESULTS = Path("docs/results")


def run(metrics: dict[str, float], *, cpus: int = 2, command: str = "python -m benchmarks.x") -> dict:
    return {"command": command, "metrics": metrics, "environment": {"system": "Linux", "cpus": cpus}}


def verdicts(old: list[dict], new: list[dict]) -> dict[str, str]:
    return {change.metric: change.verdict for change in compare.compare({"x": old}, {"x": new})}


def test_what_must_be_zero_is_judged_in_every_run_and_whatever_it_was_before():
    one, none = run({"lost_writes": 1}), run({"lost_writes": 0})
    assert verdicts([none], [one]) == {"lost_writes": "worse"}
    assert verdicts([one], [one]) == {"lost_writes": "worse"}
    assert verdicts([one], [none]) == {"lost_writes": "better"}
    assert verdicts([none], [run({"x_over_y": 1.0})])["lost_writes"] == "worse"  # nobody looked
    assert verdicts([none] * 3, [none, one, none]) == {"lost_writes": "worse"}
    # Nothing excuses it: no other machine, no other arguments, no benchmark that is new.
    assert verdicts([none], [run({"lost_writes": 1}, cpus=8, command="other")]) == {"lost_writes": "worse"}
    assert verdicts([], [run({"lost_writes": 1, "x_over_y": 2.0})]) == {"lost_writes": "worse"}


def test_single_runs_compare_ratios_against_a_tolerance_and_seconds_not_at_all():
    old = run({"rps_over_noop": 0.50, "us_per_query_over_faiss": 1.00, "R@50": 0.90, "writes_per_s": 100})
    inside = run({"rps_over_noop": 0.44, "us_per_query_over_faiss": 1.14, "R@50": 0.86, "writes_per_s": 1})
    outside = run({"rps_over_noop": 0.42, "us_per_query_over_faiss": 1.16, "R@50": 0.84, "writes_per_s": 1})
    names = ("rps_over_noop", "us_per_query_over_faiss", "R@50")
    same, worse, better = (dict.fromkeys(names, verdict) for verdict in ("same", "worse", "better"))
    alone = {"writes_per_s": "not compared"}
    assert verdicts([old], [inside]) == same | alone
    assert verdicts([old], [outside]) == worse | alone
    assert verdicts([outside], [old]) == better | alone


def test_several_runs_compare_seconds_when_their_ranges_are_apart():
    def runs(*values: float) -> list[dict]:
        return [run({"writes_per_s": value}) for value in values]

    assert verdicts(runs(100, 104, 98), runs(80, 70, 85)) == {"writes_per_s": "worse"}
    assert verdicts(runs(80, 70, 85), runs(100, 104, 98)) == {"writes_per_s": "better"}
    assert verdicts(runs(100, 104, 84), runs(80, 70, 85)) == {"writes_per_s": "same"}  # 84 < 85
    assert verdicts(runs(100, 101, 102), runs(95, 96, 97)) == {"writes_per_s": "same"}  # apart by 5 %
    assert verdicts(runs(100, 104, 98), runs(50, 51)) == {"writes_per_s": "not compared"}
    elsewhere = [run({"writes_per_s": value}, cpus=8) for value in (50, 51, 52)]
    assert verdicts(runs(100, 104, 98), elsewhere) == {"writes_per_s": "not compared"}


def test_a_wide_spread_hides_a_ratio_that_single_runs_would_tell_apart():
    old, new = ([run({"rps_over_noop": value}) for value in values] for values in ((1, 2, 3), (0.5, 1, 1.5)))
    assert verdicts(old, new) == {"rps_over_noop": "same"}
    assert verdicts(old[1:2], new[1:2]) == {"rps_over_noop": "worse"}


@pytest.mark.parametrize(("runs", "level"), [(3, 0.1), (4, 0.05), (5, 0.05), (6, 0.05)])
def test_chance_tells_equal_runs_apart_as_often_as_the_command_says(runs: int, level: float):
    values = range(100, 100 + 2 * runs)
    orders = list(itertools.combinations(values, runs))
    apart = sum(compare._apart(order, sorted({*values} - {*order})) for order in orders)
    assert 0 < apart / len(orders) <= level + 1e-9


def test_more_runs_find_more_and_one_strange_run_of_many_hides_nothing():
    def runs(*values: float) -> list[dict]:
        return [run({"writes_per_s": value}) for value in values]

    slow, fast = range(60, 70), [*range(99, 108), 60]
    assert verdicts(runs(*fast), runs(*slow)) == {"writes_per_s": "worse"}


def test_a_low_recall_may_not_fall_to_nothing():
    def of(value: float) -> list[dict]:
        return [run({"scratch/scalingdoc/R@1": value})]

    assert verdicts(of(0.041), of(0.0)) == {"scratch/scalingdoc/R@1": "worse"}
    assert verdicts(of(0.019), of(0.012)) == {"scratch/scalingdoc/R@1": "same"}
    assert verdicts(of(0.5), of(0.46)) == {"scratch/scalingdoc/R@1": "same"}


def test_other_arguments_are_not_compared_and_what_is_gone_or_new_is_told():
    old, new = run({"a_over_b": 1.0, "x_over_y": 1.0}), run({"a_over_b": 2.0, "z_over_y": 1.0})
    assert verdicts([old], [new]) == {"a_over_b": "better", "x_over_y": "gone", "z_over_y": "new"}
    other = run({"a_over_b": 2.0}, command="python -m benchmarks.x --documents 5")
    assert verdicts([old], [other])["a_over_b"] == "not compared"
    before = {key: value for key, value in old.items() if key != "command"}  # results did not always name it
    assert verdicts([before], [new])["a_over_b"] == "not compared"
    assert verdicts([before], [new | {"command": None}])["a_over_b"] == "better"
    finished = run({"a_over_b": 2.0}, command="python -m benchmarks.x --finished --trials runs/t.jsonl")
    assert verdicts([old], [finished])["a_over_b"] == "better"  # the same, as tables of what was run before
    assert verdicts([run({"strange": 1.0})], [run({"strange": 9.0})]) == {"strange": "not compared"}


def test_runs_of_one_commit_are_read_together_and_a_regression_exits_with_1(
    tmp_path: Path, monkeypatch, capsys
):
    for side, rates in (("old", (100, 101, 102)), ("new", (50, 51, 52))):
        (tmp_path / side).mkdir()
        for number, rate in enumerate(rates, 1):
            path = tmp_path / side / f"x.{number}.json"
            path.write_text(json.dumps(run({"writes_per_s": rate})), encoding="utf-8")
    (tmp_path / "new" / "report.json").write_text('{"methods": {}}')  # no benchmark
    assert {name: len(runs) for name, runs in compare.read(tmp_path / "new").items()} == {"x": 3}

    def compared(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["compare", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            compare.main()
        return int(ended.value.code), *capsys.readouterr()

    status, said, _ = compared(tmp_path / "old", tmp_path / "new")
    assert (status, "101 (100 to 102) | 51 (50 to 52) | -49.5% |   worse" in said) == (1, True)
    assert compared(tmp_path / "new", tmp_path / "old")[0] == 0
    status, _, refused = compared(tmp_path / "old", tmp_path / "nowhere")
    assert (status, "does not exist" in refused) == (2, True)
    # A benchmark that failed says nothing of itself: that it is missing is told.
    (tmp_path / "old" / "y.json").write_text(json.dumps(run({"lost": 0})))
    status, said, _ = compared(tmp_path / "new", tmp_path / "old")
    assert status == 0
    status, said, _ = compared(tmp_path / "old", tmp_path / "old")
    assert status == 0
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "y.json").write_text(json.dumps(run({"lost": 0})))
    status, said, _ = compared(tmp_path / "old", tmp_path / "less")
    assert (status, f"not in {tmp_path / 'less'}: x" in said) == (1, True)
    assert compared(tmp_path / "old", tmp_path / "less", "--partial")[0] == 0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_metric_has_a_direction(path: Path):
    metrics = json.loads(path.read_text(encoding="utf-8")).get("metrics", {})
    assert [name for name in metrics if rule(name) is None] == []


def test_directions_are_those_that_a_reader_would_name():
    better = {
        "rps_over_handwritten_c16": "higher",
        "us_per_query_over_faiss_default": "lower",
        "peak_memory_over_sentence_transformers": "lower",
        "scipy_over_numba_counts": "higher",
        "lookup_best_over_scalingdual_R50": "higher",
        "encode_packed_peak_gb": "lower",
        "encode_packed_tokens_per_s": "higher",
        "wrong or mixed": "zero",
        "undocumented": "zero",
        "again_latency_ms_relative": "either",
        "errors_per_request": "lower",
        "bytes_per_vector_default": "lower",
        "lookup_b1_over_torch_fp32": "higher",
    }
    assert {name: rule(name).better for name in better} == better
    assert all(
        each.noise > 0 or each.better in ("zero", "either") or "faults" in each.pattern for each in RULES
    )
