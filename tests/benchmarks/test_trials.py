from pathlib import Path

import numpy as np
import pytest

from benchmarks import distillation, trial, trials
from benchmarks.trial import Outcome, Side, Trial
from scalingnote.core.errors import DataError

ONE = Trial("medquad", "scratch", "methods/scalingdual", 0, 10)


def outcome(trial: Trial, success: list[float], *, name: str = "scalingdual") -> Outcome:
    measures = dict.fromkeys((*distillation.SHOWN, "MRR@10"), float(np.mean(success)))
    return Outcome(trial, {name: Side(measures, np.array(success), 123.0)}, 2.0)


def test_a_line_holds_the_whole_outcome(tmp_path: Path):
    success, gains = np.array([1.0, 0.0, 1.0, 1.0, 0.0]), np.linspace(0, 1, 5)
    side = Side({"R@50": 0.6, "MRR@10": 0.5}, success, 123.0, gains)
    path = tmp_path / "trials.jsonl"
    path.write_text(trials._line(Outcome(ONE, {"scalingdual": side}, 2.0)), encoding="utf-8")
    (outcome_read,) = trials.read(path)
    restored = outcome_read.sides["scalingdual"]
    assert (outcome_read.trial, restored.measures) == (ONE, side.measures)
    np.testing.assert_array_equal(restored.success, success)
    np.testing.assert_allclose(restored.gains, gains, atol=0.5 / 255)


@pytest.mark.parametrize("fault", [DataError("nothing to learn from"), RuntimeError("Ray did not start")])
def test_only_unfinished_trials_run_and_a_failure_leaves_no_line(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[Trial] = []

    def run(trial: Trial, *, run_dir: str) -> Outcome:
        started.append(trial)
        if trial.seed == 2:
            raise fault
        return outcome(trial, [1.0, 0.0])

    monkeypatch.setattr(trials, "run", run)
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "float32")
    all_trials = [Trial("medquad", "scratch", "methods/scalingdual", seed, 10) for seed in range(4)]
    path = tmp_path / "trials.jsonl"
    options = trials.trial_parser(None, datasets=[]).parse_args(["--trials", str(path), "--finished"])
    with pytest.raises(SystemExit, match="none of 4 trials"):
        trials.run_given(all_trials, options)
    path.write_text(trials._line(outcome(all_trials[1], [1.0, 1.0])), encoding="utf-8")
    options.finished = False
    outcomes = trials.run_given(all_trials, options)
    assert started == [all_trials[0], all_trials[2], all_trials[3]]
    assert [one.trial for one in outcomes] == [all_trials[0], all_trials[1], all_trials[3]]
    with pytest.raises(SystemExit, match="1 of 4 trials failed"):
        trials.require(all_trials, outcomes, options)


def test_a_row_without_a_seed_of_the_teachers_has_no_share_of_it():
    other = Trial("medquad", "scratch", "methods/x", 1, 10)
    rows = distillation.rows([outcome(ONE, [1.0, 0.0]), outcome(other, [1.0, 1.0], name="scalingnote-1l")])
    lines = {line["query side"]: line for line in distillation.table(rows)}
    assert (lines["scalingnote-1l"]["of the teacher's R@50"], lines["scalingnote-1l"]["p"]) == ("-", "-")
    assert distillation.metrics({"medquad": rows}) == {}


def test_knobs_of_stage_two_are_for_methods_that_have_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial.pipeline, "run", lambda *_, **__: {})
    monkeypatch.setattr(trial, "shortened", lambda config, **_: config)
    knobs = ("dataset.max_documents=500", "distill.epochs=1")
    plain, student = (
        trial.configured(Trial("medquad", "scratch", f"methods/{name}", 0, 10, knobs), run_dir="runs")
        for name in ("scalingdual", "scalingnote-1l")
    )
    assert plain.distill is None
    assert student.distill is not None
    assert student.distill.epochs == 1
    assert plain.dataset.max_documents == student.dataset.max_documents == 500


def test_the_table_compares_with_the_teacher_over_all_seeds():
    seeds = [Trial("medquad", "scratch", "methods/scalingdual", seed, 10) for seed in range(2)]
    teacher = [outcome(trial, [1.0] * 9 + [0.0]) for trial in seeds]
    students = [
        outcome(Trial("medquad", "scratch", "methods/x", trial.seed, 10), success, name="scalingnote-1l")
        for trial, success in zip(seeds, ([1.0] * 8 + [0.0] * 2, [1.0] * 7 + [0.0] * 3), strict=True)
    ]
    rows = distillation.rows([*teacher, *students])
    first, second = distillation.table(rows)
    assert (first["query side"], first["p"], second["query side"]) == ("scalingdual", "-", "scalingnote-1l")
    assert second["of the teacher's R@50"] == "83.3%"
    assert float(second["p"]) == pytest.approx(
        distillation.p_value(rows["scalingnote-1l"], rows["scalingdual"]), abs=1e-3
    )
    rows["scalingnote-4l"] = distillation.rows([students[0]])["scalingnote-1l"]  # only the first seed
    assert distillation.share(rows["scalingnote-4l"], rows["scalingdual"]) == pytest.approx(8 / 9)
    del rows["scalingnote-4l"]
    assert distillation.metrics({"medquad": rows}) == {"scalingnote_over_scalingdual_R50": 0.8333}


def test_committed_trials_can_be_read():
    file = Path("docs/results/trials.jsonl")
    committed = [one.trial for one in trials.read(file)]
    for dataset, method in {(one.dataset, one.method) for one in committed}:
        trial.unchanged(dataset, method)
    assert len(set(committed)) == len(committed)


def test_trials_of_several_machines_name_them_all():
    trial = Trial("medquad", "scratch", "methods/twinbert", 0, 9)
    outcomes = [
        Outcome(trial, {}, environment={"processor": processor, "cpus": 2})
        for processor in ("one", "other", "one")
    ]
    assert trials.trial_machines(outcomes) == {"processor": "one, other", "cpus": 2}
    assert trials.trial_machines([]) == {}
