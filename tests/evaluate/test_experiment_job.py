"""The report from logs on disk: a planted effect, a planted mismatch, and every ranking model as a judge."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tiny
from in_process import without_ray
from scalingnote.cli import main as cli
from scalingnote.core.bm25 import BM25, document_texts
from scalingnote.core.config import load
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.evaluate.experiment import job
from scalingnote.evaluate.experiment.config import DualPooledJudge, ExperimentConfig, arm_of
from scalingnote.run import pipeline
from scalingnote.train.cross_encoder.pairs import PairEncoder
from scalingnote.triplets.collect.config import BM25Ranker

ARMS = "split={name: towers, arms: [{name: control, share: 0.5}, {name: student, share: 0.5}]}"
DOCUMENTS = tiny.document_rows()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return tiny.dataset(str(tmp_path_factory.mktemp("world") / "dataset"))


@pytest.fixture
def here(monkeypatch):
    """Judges in this process: that it is done on Ray is tested once."""

    without_ray(monkeypatch)


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


def test_a_planted_effect_is_found_and_the_rest_is_not(cluster, dataset, tmp_path):
    settings = config(tmp_path, "relevance.requests_per_arm=150")
    write_logs(tmp_path, settings)
    made = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    result = made.read_json("report.json")
    assert result["warnings"] == []
    assert result["requests"] == {
        "read": 1202,
        "rejected": 2,
        "used": 1200,
        "rated": 1200,
        "clicked": result["requests"]["clicked"],
        "left_out": {},
    }
    found = result["comparisons"]["student"]
    means = {
        arm: {m: v["mean"] for m, v in result["arms"][arm]["measures"].items()} for arm in result["arms"]
    }
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
    assert found["errors"] == found["partial"] | {"relative": None}
    assert (found["errors"]["difference"], found["errors"]["p"]) == (0, None)
    assert set(result["arms"]["control"]["latency_ms"]) == {"encode", "search", "total"}
    assert sum(arm["units"] for arm in result["arms"].values()) == 300 == made.counts["units"]
    assert made.table("judged")["score"].null_count == 0
    assert made.table("rejected")["reason"].to_pylist() == ["torn: the file ends within the line"] * 2
    html = Path(made.file("report.html")).read_text()
    text = Path(made.file("report.md")).read_text()
    for name in found:
        assert name in html
        assert name in text
    # Nothing changed: nothing is done again. The log has grown: another report.
    again = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    assert again.digest == made.digest
    (tmp_path / "access-c.jsonl").write_text("{}\n")
    grown = job._checksums(settings, job._check_inputs(settings, dataset))
    assert grown != made.manifest.info["inputs_sha256"]


def test_a_mismatch_is_said_loudly(here, dataset, tmp_path, capsys):
    settings = config(tmp_path, "relevance=null", "start=2001-09-10T00:00:00Z")
    write_logs(tmp_path, settings, lost=0.4)
    made = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    result = made.read_json("report.json")
    assert result["sample_ratio"]["mismatch"]
    assert result["warnings"][0].startswith("SAMPLE RATIO MISMATCH (p = ")
    assert "covers 7" not in result["warnings"][-1]
    assert result["requests"]["left_out"]["outside of start and end"] > 0
    assert not made.names("judged")
    assert not any(name.startswith("irrelevant") for name in result["comparisons"]["student"])
    assert "SAMPLE RATIO MISMATCH" in Path(made.file("report.html")).read_text()
    assert "SAMPLE RATIO MISMATCH" in Path(made.file("report.md")).read_text()


def test_a_killed_report_keeps_what_was_judged(here, dataset, tmp_path, monkeypatch):
    settings = config(tmp_path, "relevance.requests_per_arm=50")
    write_logs(tmp_path, settings)
    monkeypatch.setattr(job, "PAIRS_PER_BLOCK", 100)
    passes = []
    monkeypatch.setattr(
        job,
        "document_rows",
        lambda *given, texts=job.document_rows: passes.append(1) or texts(*given),
    )
    whole = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "whole"))
    blocks = []

    def dying(judge, pairs, documents, judge_pairs=job.judge_pairs):
        blocks.append(len(pairs))
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return judge_pairs(judge, pairs, documents)

    monkeypatch.setattr(job, "judge_pairs", dying)
    with pytest.raises(KeyboardInterrupt):
        job.run(settings, dataset=dataset.uri, output=str(tmp_path / "killed"))
    made = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "killed"))
    total = whole.table("judged").num_rows
    # The two that were finished are not judged again; the third, which died, is.
    assert blocks[:4] == [100, 100, 100, 100]
    assert sum(blocks) == total + 100
    assert len(passes) == 2  # over the corpus: one a report, however many blocks there are
    assert made.table("judged").equals(whole.table("judged"))


def test_bm25_judges_by_the_best_document_of_the_query(dataset):
    documents = dataset.table("documents")
    texts = document_texts(documents)
    queries = [documents["content"][0].as_py(), documents["content"][0].as_py(), "no such words"]
    pairs = pa.table({"query": queries, "doc_id": ["d000", "d001", "d000"]})
    pairs = pa.concat_tables([pairs, pa.table({"query": ["x"], "doc_id": ["gone"]})])
    judging = job.load_judge(BM25Ranker(), dataset)
    known = job.document_rows(dataset, pairs["doc_id"].combine_chunks())
    scores = job.judge_pairs(judging, pairs, known)["score"].to_pylist()
    plain = BM25.build(texts).scores(queries[0])
    assert scores[:2] == pytest.approx([plain[0] / plain.max(), plain[1] / plain.max()])
    assert scores[0] == 1.0
    assert scores[2:] == [None, None]


def test_our_own_cross_encoder_judges_by_its_logit(dataset, tmp_path):
    teacher = tiny.cross_encoder(str(tmp_path / "teacher"))
    judging = job.load_judge(DualPooledJudge(uri=teacher.uri), dataset)
    documents = job.document_rows(dataset, pa.array(["d003", "d001"]))
    queries = ["ba ko", "li me"]
    temperature = 0.05  # of the cosine that it was trained with
    encoder = PairEncoder.load(teacher.directory("model"), temperature=temperature)
    model = encoder.model
    rows = model.document_prompt.rows(*(documents[name].to_pylist() for name in job.DOCUMENT_COLUMNS[1:]))
    logits = encoder.scores(model.query_prompt.rows(queries), rows)
    np.testing.assert_allclose(judging(queries, documents), 1 / (1 + np.exp(-logits)), rtol=1e-6)
    assert judging([], documents.slice(0, 0)).shape == (0,)


def test_bad_input_is_refused_before_work_is_spent(here, dataset, tmp_path, monkeypatch):
    (tmp_path / "access-a.jsonl").write_text(
        '{"time": 1, "request_id": "r", "path": "/encode", "status": 200}\n'
    )
    for name in ("feedback", "clicks"):
        (tmp_path / f"{name}.jsonl").write_text('{"request_id": "r", "satisfied": 1, "doc_id": "d"}\n')
    run = {"dataset": dataset.uri, "output": str(tmp_path / "out")}
    with pytest.raises(
        DataError, match=r"no request of experiment 'towers' in 1 files of 1 lines \(1 not a search"
    ):
        job.run(config(tmp_path), **run)
    monkeypatch.setattr(job, "_read_logs", None)
    with pytest.raises(DataError, match="no access log at"):
        job.run(config(tmp_path, "logs=[/nowhere]"), **run)
    with pytest.raises(DataError, match="no file at /nowhere"):
        job.run(config(tmp_path, "feedback=/nowhere"), **run)
    wrong = "relevance.judge={kind: cross_encoder_artifact, uri: /nowhere}"
    with pytest.raises(ArtifactError, match="no finished 'cross_encoder' artifact"):
        job.run(config(tmp_path, wrong), **run)
    monkeypatch.setattr(job, "MAX_BM25_DOCUMENTS", 1)
    with pytest.raises(ConfigError, match=r"BM25 as a judge holds all .* set relevance\.judge"):
        job.run(config(tmp_path), **run)


def test_the_command_prints_the_table(here, dataset, tmp_path, monkeypatch, capsys):
    settings = config(tmp_path)
    write_logs(tmp_path, settings)
    monkeypatch.setattr(pipeline, "load_run", lambda _: None)
    monkeypatch.setattr(pipeline, "locate", lambda *_: dataset)
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    command = ["experiment", str(path), "--set", "relevance=null", "--set", f"run_dir={tmp_path}/run"]
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


@pytest.mark.parametrize(("below", "share"), [(0.0, 0), (1.5, 1)])  # BM25 relative to the best: 0 to 1
def test_documents_with_a_score_below_the_bound_are_irrelevant(here, dataset, tmp_path, below, share):
    settings = config(tmp_path, f"relevance.irrelevant_below={below}", "relevance.requests_per_arm=9")
    write_logs(tmp_path, settings, users=40)
    made = job.run(settings, dataset=dataset.uri, output=str(tmp_path / "out"))
    for arm in made.read_json("report.json")["arms"].values():
        assert arm["measures"]["irrelevant@4"]["mean"] == arm["measures"]["irrelevant@20"]["mean"] == share
    assert f"irrelevant below {below:g}" in Path(made.file("report.md")).read_text()
