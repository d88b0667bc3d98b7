"""The report from logs on disk: a planted effect, a planted mismatch, and a cross-encoder as the judge."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import tiny
from in_process import without_ray
from scalingnote.cli import main as cli
from scalingnote.core.bm25 import document_texts
from scalingnote.core.config import load
from scalingnote.core.errors import DataError
from scalingnote.evaluate.experiment import job, outcomes, report
from scalingnote.evaluate.experiment.config import ExperimentConfig, arm_of
from scalingnote.run import pipeline
from scalingnote.triplets.collect import transformer_models
from scalingnote.triplets.collect.transformer_models import PairScorer

ARMS = "split={name: towers, arms: [{name: control, share: 0.5}, {name: student, share: 0.5}]}"
JUDGE = "relevance.judge.path=words"
DOCUMENTS = tiny.document_rows()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return tiny.dataset(str(tmp_path_factory.mktemp("world") / "dataset"))


class WordScorer:
    """The share of the query's words that the document has."""

    blocks: ClassVar[list[int]] = []
    dies_at = 0

    def __init__(self, config):
        assert config.path == "words"

    def score(self, queries, documents):
        self.blocks.append(len(queries))
        if len(self.blocks) == self.dies_at:
            raise KeyboardInterrupt
        words = [(set(q.split()), set(d.split())) for q, d in zip(queries, documents, strict=True)]
        return np.array([len(asked & read) / len(asked) for asked, read in words], np.float32)


@pytest.fixture
def here(monkeypatch):
    """Judging by words, in this process: that models judge on Ray is tested once."""
    without_ray(monkeypatch)
    monkeypatch.setattr(transformer_models, "PairScorer", WordScorer)
    monkeypatch.setattr(WordScorer, "blocks", [])


def write_logs(folder: Path, config: ExperimentConfig, *, users: int = 300, lost: float = 0.0) -> None:
    """The control finds a query's document first in half of its answers, the student always."""
    rng = np.random.default_rng(0)
    files = [[], []]
    feedback, clicks = [], []
    for number in range(4 * users):
        unit = f"u:{number % users}"
        arm = arm_of(unit, config.split).name
        if arm == "student" and number % users < lost * users:
            continue
        own = int(rng.integers(len(DOCUMENTS)))
        others = [DOCUMENTS[i]["doc_id"] for i in rng.permutation(len(DOCUMENTS)) if i != own][:5]
        good = arm == "student" or rng.random() < 0.5
        found = ([DOCUMENTS[own]["doc_id"]] if good else []) + others
        row = {
            "time": 1e9 + 86_400 * 8 * number / users / 4,
            "request_id": f"r{number}",
            "path": "/search",
            "status": 200,
            "arm": arm,
            "unit": unit,
            "query": DOCUMENTS[own]["content"],
            "k": 10,
            "doc_ids": found[: 4 if number % 10 == 0 else 6],
            "scores": [1.0],
            "shards": 2,
            "shards_answered": 2,
            "timings_ms": {"encode": 0.1, "search": 1.0, "total": float(rng.gamma(4, 2))},
        }
        files[number % 2].append(json.dumps(row) + "\n")
        feedback.append({"request_id": f"r{number}", "satisfied": bool(rng.random() < 0.3 + 0.3 * good)})
        if good:
            clicks.append({"request_id": f"r{number}", "doc_id": DOCUMENTS[own]["doc_id"]})
    for name, lines in zip("ab", files, strict=True):
        (folder / f"access-{name}.jsonl").write_text("".join(lines) + '{"time": 1, "requ')
    for name, rows in (("feedback", feedback), ("clicks", clicks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, *more: str) -> ExperimentConfig:
    signals = [f"feedback={folder}/feedback.jsonl", f"clicks={folder}/clicks.jsonl"]
    return load(ExperimentConfig, [], [f"logs=[{folder}]", ARMS, *signals, *more])


def test_a_planted_effect_is_found_and_the_rest_is_not(here, dataset, tmp_path):
    settings = config(tmp_path, JUDGE, "relevance.requests_per_arm=150")
    write_logs(tmp_path, settings)
    made = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    result = made.read_json("report.json")
    assert result["warnings"] == []
    assert result["requests"] == {"used": 1200, "rejected": 2, "left_out": {}}
    judged = {"pairs": made.table("judged").num_rows, "unknown": 0}
    assert result["judge"] == {"path": "words", "irrelevant_below": 0.5, **judged}
    found = result["comparisons"]["student"]
    assert list(found) == sorted(outcomes.MEASURES)
    means = {arm: facts["means"] for arm, facts in result["arms"].items()}
    assert means["student"]["click_through"] == 1
    assert means["control"]["click_through"] == pytest.approx(0.5, abs=0.05)
    # Of 4 shown documents one more is relevant in half of the answers.
    assert found["irrelevant@4"]["difference"] == pytest.approx(-0.125, abs=0.04)
    for measure in ("irrelevant@4", "irrelevant@20", "satisfaction", "click_through"):
        assert found[measure]["p_holm"] < 0.05
    assert found["satisfaction"]["difference"] == pytest.approx(0.15, abs=0.06)
    for measure in ("fewer_than_5", "latency_ms"):
        assert found[measure]["p"] > 0.05
        assert found[measure]["low"] < 0 < found[measure]["high"]
    nothing = {"difference": 0, "low": None, "high": None, "p": None, "p_holm": None}
    assert found["errors"] == found["partial"] == nothing
    assert sum(arm["units"] for arm in result["arms"].values()) == 300 == made.counts["units"]
    assert made.table("rejected")["reason"].to_pylist() == ["incomplete: the file ends within the line"] * 2
    assert len(made.table("sample")) == 300
    for name in ("report.html", "report.md"):
        text = Path(made.file(name)).read_text()
        assert report.summary(result).split("units")[0] in text
        assert "irrelevant below 0.5" in text
        assert all(measure in text for measure in found)
    # Nothing changed: nothing is done again. The log has grown: another report.
    assert job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out")).digest == made.digest
    (tmp_path / "access-c.jsonl").write_text("{}\n")
    grown = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    assert (grown.uri != made.uri, grown.counts["rejected"]) == (True, 3)


def test_a_mismatch_is_said_loudly(here, dataset, tmp_path):
    settings = config(tmp_path, "start=2001-09-10T00:00:00Z")
    write_logs(tmp_path, settings, lost=0.4)
    made = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    result = made.read_json("report.json")
    assert result["sample_ratio"]["mismatch"]
    assert result["warnings"][0].startswith("SAMPLE RATIO MISMATCH (p = ")
    assert result["requests"]["left_out"]["outside of start and end"] > 0
    assert not made.names("judged")
    assert not any(name.startswith("irrelevant") for name in result["comparisons"]["student"])
    assert "SAMPLE RATIO MISMATCH" in Path(made.file("report.html")).read_text()
    assert "SAMPLE RATIO MISMATCH" in Path(made.file("report.md")).read_text()


def test_what_makes_a_report_doubtful_is_said():
    requests = {"used": 980, "left_out": {"not by this split": 20}}
    doubtful = {"sample_ratio": {"mismatch": False}, "requests": requests, "days": 6.9}
    other_arms, days = report.warnings(doubtful)
    assert other_arms.startswith("20 requests were answered by another arm")
    assert days.startswith("The log covers 6.9 days")


def test_a_killed_report_keeps_what_was_judged(here, dataset, tmp_path, monkeypatch):
    settings = config(tmp_path, JUDGE, "relevance.requests_per_arm=50")
    write_logs(tmp_path, settings)
    monkeypatch.setattr(job, "PAIRS_PER_BLOCK", 100)
    whole = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "whole"))
    WordScorer.blocks.clear()
    monkeypatch.setattr(WordScorer, "dies_at", 3)
    with pytest.raises(KeyboardInterrupt):
        job.run(settings, dataset=dataset.uri, output=str(tmp_path / "killed"))
    made = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "killed"))
    # The two that were finished are not judged again; the third, which died, is.
    assert WordScorer.blocks[:4] == [100, 100, 100, 100]
    assert sum(WordScorer.blocks) == whole.table("judged").num_rows + 100
    for name in ("judged", "units"):
        assert made.table(name).equals(whole.table(name))


def test_a_cross_encoder_judges_on_ray(cluster, dataset, tmp_path):
    model = tiny.pair_classifier(tmp_path / "model", [row["content"] for row in DOCUMENTS])
    settings = config(tmp_path, f"relevance.judge.path={model}", "relevance.requests_per_arm=9")
    write_logs(tmp_path, settings)
    found = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out")).table("judged")
    documents = dataset.table("documents")
    text_of = dict(zip(documents["doc_id"].to_pylist(), document_texts(documents), strict=True))
    scorer = PairScorer(settings.relevance.judge)
    expected = scorer.score(found["query"].to_pylist(), [text_of[i] for i in found["doc_id"].to_pylist()])
    np.testing.assert_allclose(found["score"].to_numpy(), expected, atol=1e-6)
    assert np.ptp(expected) > 0.1


def test_documents_that_are_gone_have_no_score(here, dataset, tmp_path):
    settings = config(tmp_path, JUDGE)
    write_logs(tmp_path, settings, users=40)
    smaller = tiny.dataset(str(tmp_path / "smaller"), count=48)
    result = job.run(settings, dataset=smaller.uri, output=str(tmp_path / "out")).read_json("report.json")
    assert 0.3 < result["judge"]["unknown"] / result["judge"]["pairs"] < 0.7
    assert 0 < result["arms"]["control"]["means"]["irrelevant@4"] < 1


def test_bad_input_is_refused_before_work_is_spent(here, dataset, tmp_path, monkeypatch):
    (tmp_path / "access-a.jsonl").write_text(
        '{"time": 1, "request_id": "r", "path": "/encode", "status": 200}\n'
    )
    for name in ("feedback", "clicks"):
        (tmp_path / f"{name}.jsonl").write_text('{"request_id": "r", "satisfied": 1, "doc_id": "d"}\n')
    run = {"dataset": dataset.uri, "output": str(tmp_path / "out")}
    with pytest.raises(DataError, match=r"no request of experiment 'towers' in 1 files \(left out: 1 not a "):
        job.run(config(tmp_path), **run)
    monkeypatch.setattr(outcomes, "read_outcomes", None)
    for wrong in ("logs=[/nowhere]", "feedback=/nowhere"):
        with pytest.raises(DataError, match="no file at /nowhere"):
            job.run(config(tmp_path, wrong), **run)


def test_the_command_prints_the_table(here, dataset, tmp_path, monkeypatch, capsys):
    settings = config(tmp_path)
    write_logs(tmp_path, settings)
    monkeypatch.setattr(pipeline, "load_run", lambda _: None)
    monkeypatch.setattr(pipeline, "locate", lambda *_: dataset)
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    command = ["experiment", str(path), "--set", f"run_dir={tmp_path}/run"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "| satisfaction" in out
    assert f"{tmp_path}/run/experiment/" in out
    assert cli.main([*command, "--set", "feedbak=x"]) == 2
    assert "did you mean 'feedback'" in capsys.readouterr().err
    # The same as a job: it finds the report done.
    assert cli.main([*command, "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["kind"], line["counts"]["requests"]) == ("experiment", 1200)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert cli.main([*command, "--set", "run_dir=runs/x"]) == 2
    assert "run_dir is 'runs/x'" in capsys.readouterr().err


def test_the_config_in_the_repository_parses():
    root = Path(cli.__file__).parents[2]
    assert load(ExperimentConfig, [root / "configs/experiment.yaml"]).split.arms[1].name == "student"
