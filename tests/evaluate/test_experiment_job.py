"""Reports from logs on disk: a simulated effect, a simulated mismatch, and a cross-encoder as the judge."""

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
    """Scorer by the share of the query's words that are in the document."""

    blocks: ClassVar[list[int]] = []
    dies_at = 0

    def __init__(self, config):
        assert config.path == "words"

    def score(self, queries, documents):
        self.blocks.append(len(queries))
        if len(self.blocks) == self.dies_at:
            raise KeyboardInterrupt
        words = [(set(q.split()), set(d.split())) for q, d in zip(queries, documents, strict=True)]
        return np.array([len(query & text) / len(query) for query, text in words], np.float32)


@pytest.fixture
def here(monkeypatch):
    """Judge by words in this process; one test runs the judge on Ray."""
    without_ray(monkeypatch)
    monkeypatch.setattr(transformer_models, "PairScorer", WordScorer)
    monkeypatch.setattr(WordScorer, "blocks", [])


def write_logs(folder: Path, config: ExperimentConfig, *, users: int = 300, lost: float = 0.0) -> None:
    """Write logs: the first result is relevant in half of the control's answers, and all of the student's."""
    rng = np.random.default_rng(0)
    files = [[], []]
    feedback, clicks = [], []
    for number in range(4 * users):
        unit = f"u:{number % users}"
        arm = arm_of(unit, config.split).name
        if arm == "student" and number % users < lost * users:
            continue
        relevant = int(rng.integers(len(DOCUMENTS)))
        others = [DOCUMENTS[i]["doc_id"] for i in rng.permutation(len(DOCUMENTS)) if i != relevant][:5]
        is_good = arm == "student" or rng.random() < 0.5
        results = ([DOCUMENTS[relevant]["doc_id"]] if is_good else []) + others
        row = {
            "time": 1e9 + 86_400 * 8 * number / users / 4,
            "request_id": f"r{number}",
            "path": "/search",
            "status": 200,
            "arm": arm,
            "unit": unit,
            "query": DOCUMENTS[relevant]["content"],
            "k": 10,
            "doc_ids": results[: 4 if number % 10 == 0 else 6],
            "scores": [1.0],
            "shards": 2,
            "shards_answered": 2,
            "timings_ms": {"encode": 0.1, "search": 1.0, "total": float(rng.gamma(4, 2))},
        }
        files[number % 2].append(json.dumps(row) + "\n")
        feedback.append({"request_id": f"r{number}", "satisfied": bool(rng.random() < 0.3 + 0.3 * is_good)})
        if is_good:
            clicks.append({"request_id": f"r{number}", "doc_id": DOCUMENTS[relevant]["doc_id"]})
    for name, lines in zip("ab", files, strict=True):
        (folder / f"access-{name}.jsonl").write_text("".join(lines) + '{"time": 1, "requ')
    for name, rows in (("feedback", feedback), ("clicks", clicks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, *more: str) -> ExperimentConfig:
    signals = [f"feedback={folder}/feedback.jsonl", f"clicks={folder}/clicks.jsonl"]
    return load(ExperimentConfig, [], [f"logs=[{folder}]", ARMS, *signals, *more])


def test_only_the_simulated_effect_is_significant(here, dataset, tmp_path):
    settings = config(tmp_path, JUDGE, "relevance.requests_per_arm=150")
    write_logs(tmp_path, settings)
    artifact = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    result = artifact.read_json("report.json")
    assert result["warnings"] == []
    assert result["requests"] == {"used": 1200, "rejected": 2, "left_out": {}}
    judged_counts = {"pairs": artifact.table("judged").num_rows, "unknown": 0}
    assert result["judge"] == {"path": "words", "irrelevant_below": 0.5, **judged_counts}
    comparison = result["comparisons"]["student"]
    assert list(comparison) == sorted(outcomes.MEASURES)
    means = {arm: facts["means"] for arm, facts in result["arms"].items()}
    assert means["student"]["click_through"] == 1
    assert means["control"]["click_through"] == pytest.approx(0.5, abs=0.05)
    # Half of the answers have one more relevant document among their first 4.
    assert comparison["irrelevant@4"]["difference"] == pytest.approx(-0.125, abs=0.04)
    for measure in ("irrelevant@4", "irrelevant@20", "satisfaction", "click_through"):
        assert comparison[measure]["p_holm"] < 0.05
    assert comparison["satisfaction"]["difference"] == pytest.approx(0.15, abs=0.06)
    for measure in ("fewer_than_5", "latency_ms"):
        assert comparison[measure]["p"] > 0.05
        assert comparison[measure]["low"] < 0 < comparison[measure]["high"]
    no_difference = {"difference": 0, "low": None, "high": None, "p": None, "p_holm": None}
    assert comparison["errors"] == comparison["partial"] == no_difference
    assert sum(arm["units"] for arm in result["arms"].values()) == 300 == artifact.counts["units"]
    assert (
        artifact.table("rejected")["reason"].to_pylist() == ["incomplete: the file ends within the line"] * 2
    )
    assert len(artifact.table("sample")) == 300
    for name in ("report.html", "report.md"):
        text = Path(artifact.file(name)).read_text()
        assert report.summary(result).split("units")[0] in text
        assert "irrelevant below 0.5" in text
        assert all(measure in text for measure in comparison)
    # Unchanged inputs give the same report; a longer log gives another one.
    assert job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out")).digest == artifact.digest
    (tmp_path / "access-c.jsonl").write_text("{}\n")
    longer = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    assert (longer.uri != artifact.uri, longer.counts["rejected"]) == (True, 3)


def test_a_mismatch_of_group_sizes_is_the_first_warning(here, dataset, tmp_path):
    settings = config(tmp_path, "start=2001-09-10T00:00:00Z")
    write_logs(tmp_path, settings, lost=0.4)
    artifact = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    result = artifact.read_json("report.json")
    assert result["sample_ratio"]["mismatch"]
    assert result["warnings"][0].startswith("SAMPLE RATIO MISMATCH (p = ")
    assert result["requests"]["left_out"]["outside of start and end"] > 0
    assert not artifact.names("judged")
    assert not any(name.startswith("irrelevant") for name in result["comparisons"]["student"])
    assert "SAMPLE RATIO MISMATCH" in Path(artifact.file("report.html")).read_text()
    assert "SAMPLE RATIO MISMATCH" in Path(artifact.file("report.md")).read_text()


def test_other_arms_and_short_logs_give_warnings():
    requests = {"used": 980, "left_out": {"not by this split": 20}}
    facts = {"sample_ratio": {"mismatch": False}, "requests": requests, "days": 6.9}
    other_arms, days = report.warnings(facts)
    assert other_arms.startswith("20 requests were answered by another arm")
    assert days.startswith("The log covers 6.9 days")


def test_a_killed_report_keeps_finished_judgements(here, dataset, tmp_path, monkeypatch):
    settings = config(tmp_path, JUDGE, "relevance.requests_per_arm=50")
    write_logs(tmp_path, settings)
    monkeypatch.setattr(job, "PAIRS_PER_BLOCK", 100)
    uninterrupted = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "whole"))
    WordScorer.blocks.clear()
    monkeypatch.setattr(WordScorer, "dies_at", 3)
    with pytest.raises(KeyboardInterrupt):
        job.run(settings, dataset=dataset.uri, output=str(tmp_path / "killed"))
    artifact = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "killed"))
    # The two finished blocks are not judged again, but the third, which was interrupted, is.
    assert WordScorer.blocks[:4] == [100, 100, 100, 100]
    assert sum(WordScorer.blocks) == uninterrupted.table("judged").num_rows + 100
    for name in ("judged", "units"):
        assert artifact.table(name).equals(uninterrupted.table(name))


def test_a_cross_encoder_judges_on_ray(cluster, dataset, tmp_path):
    model = tiny.pair_classifier(tmp_path / "model", [row["content"] for row in DOCUMENTS])
    settings = config(tmp_path, f"relevance.judge.path={model}", "relevance.requests_per_arm=9")
    write_logs(tmp_path, settings)
    judged = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out")).table("judged")
    documents = dataset.table("documents")
    text_of = dict(zip(documents["doc_id"].to_pylist(), document_texts(documents), strict=True))
    scorer = PairScorer(settings.relevance.judge)
    expected = scorer.score(judged["query"].to_pylist(), [text_of[i] for i in judged["doc_id"].to_pylist()])
    np.testing.assert_allclose(judged["score"].to_numpy(), expected, atol=1e-6)
    assert np.ptp(expected) > 0.1


def test_missing_documents_have_no_score(here, dataset, tmp_path):
    settings = config(tmp_path, JUDGE)
    write_logs(tmp_path, settings, users=40)
    smaller = tiny.dataset(str(tmp_path / "smaller"), count=48)
    result = job.run(settings, dataset=smaller.uri, output=str(tmp_path / "out")).read_json("report.json")
    assert 0.3 < result["judge"]["unknown"] / result["judge"]["pairs"] < 0.7
    assert 0 < result["arms"]["control"]["means"]["irrelevant@4"] < 1


def test_invalid_input_is_refused_before_any_work(here, dataset, tmp_path, monkeypatch):
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
    # The same command as a job finds the finished report.
    assert cli.main([*command, "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["kind"], line["counts"]["requests"]) == ("experiment", 1200)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert cli.main([*command, "--set", "run_dir=runs/x"]) == 2
    assert "run_dir is 'runs/x'" in capsys.readouterr().err


def test_the_config_in_the_repository_parses():
    root = Path(cli.__file__).parents[2]
    assert load(ExperimentConfig, [root / "configs/experiment.yaml"]).split.arms[1].name == "student"
