"""Migration to another model: built artifacts, kills in between, and refused requests."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

import access_lines
from in_process import without_ray
from scalingnote.cli.main import main
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.encode import documents
from scalingnote.evaluate import pair_comparison
from scalingnote.run import migration, pipeline
from scalingnote.run.migration import Migration
from scalingnote.run.service_config import LiveServe, ServeConfig
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import open_artifact
from two_models import WIDTH, indexed_run

# A separate process, which kills itself after the sixth part that it encodes.
KILLED = """
import os, signal, sys
from scalingnote.cli.main import main
from scalingnote.encode.documents import DocumentPartEncoder
encode, names = DocumentPartEncoder.__call__, []
def encode_or_die(self, name, part):
    names.append(name)
    if len(names) > 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(self, name, part)
DocumentPartEncoder.__call__ = encode_or_die
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return indexed_run(tmp_path_factory.mktemp("built"))


@pytest.fixture
def run(built: tuple[Path, Path], tmp_path: Path) -> tuple[str, str]:
    """Return a copy of the run, which a test may change, and the other model."""
    shutil.copytree(built[0], tmp_path / "run")
    return str(tmp_path / "run"), str(built[1])


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often this process encodes each part of the documents."""
    without_ray(monkeypatch)
    counts, encode = Counter[str](), documents.DocumentPartEncoder.__call__

    def count(self: documents.DocumentPartEncoder, name: str, part: object) -> object:
        counts[name] += 1
        return encode(self, name, part)

    monkeypatch.setattr(documents.DocumentPartEncoder, "__call__", count)
    return counts


def migrated(run_dir: str, to: str, *overrides: str) -> Migration:
    prepared = migration.begin(run_dir, to, overrides)
    migration.build(prepared)
    migration.compare(prepared)
    return migration.read(run_dir)


def test_the_plan_lists_finished_stages_and_starts_nothing(run, capsys):
    run_dir, other = run
    before = sorted(Path(run_dir).rglob("*"))
    assert main(["migrate", "--run", run_dir, "--to", other, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = dict([cell.strip() for cell in line.split("|")[1:3]] for line in lines if "|" in line)
    assert rows["documents"] == "96"
    assert rows["finished stages"] == "prepare"
    assert rows["stages to run"] == "adopt, encode, quantize, index"
    tokens = open_artifact(only(run_dir, "encode"), kind="embeddings").manifest.info["encoding"]["tokens"]
    assert rows["their tokens, by the old model"] == f"{int(tokens):,}"
    assert rows["time on the same machines, about"].endswith(" s")
    assert sorted(Path(run_dir).rglob("*")) == before


def only(run_dir: str, stage: str) -> str:
    (place,) = (Path(run_dir) / stage).iterdir()
    return str(place)


def test_both_models_are_compared_and_documents_encoded_once(run, encoded, capsys):
    run_dir, other = run
    assert main(["migrate", "--run", run_dir, "--to", other]) == 0
    assert len(encoded) == 24
    assert set(encoded.values()) == {1}
    output = capsys.readouterr().out
    assert f"migrate --run {run_dir} --cut-over" in output

    result = migration.read(run_dir)
    comparison = open_artifact(str(result.comparison), kind="comparison")
    report = comparison.read_json("report.json")
    before, after = report["pairs"]["before"], report["pairs"]["after"]
    assert (before["dim"], after["dim"]) == (32, WIDTH)
    assert after["bytes"]["index"] < before["bytes"]["index"]
    assert report["queries"] == {"source": "the test split", "count": 10}
    # The stored answers are those of both indexes.
    rows = comparison.table("queries.parquet").to_pylist()
    for name, config in (("before", result.before), ("after", result.after)):
        encoder = pair_comparison.QueryEncoder(pipeline.locate(config, "dual_encoder").directory("query"))
        searcher = Searcher.open(pipeline.locate(config, "index").uri)
        hits = searcher.search(encoder.encode([row["query"] for row in rows]), k=10)
        assert [row[name] for row in rows] == [[hit.doc_id for hit in one] for one in hits]
    shares = [len({*row["before"]} & {*row["after"]}) / 10 for row in rows]
    assert [row["overlap@10"] for row in rows] == pytest.approx(shares)
    assert report["overlap@10"] == pytest.approx(np.mean(shares))
    assert 0 < report["overlap@10"] < 1
    # The only relevant document of a query is its source.
    relevant = {row["query"]: place for row in rows for place in (row["before"], row["after"])}
    assert len(relevant) == len(rows)
    assert report["judged"] == 10
    assert 0 < before["measures"]["nDCG@10"] <= 1
    assert after["measures"]["nDCG@10"] != before["measures"]["nDCG@10"]
    assert f"{before['measures']['nDCG@10']:.4f}" in output
    assert "nDCG@10" in comparison.read_bytes("report.md").decode()
    # Searches open the old run until the cut-over.
    assert pipeline.load_run(run_dir) == result.before

    encoded.clear()
    assert main(["migrate", "--run", run_dir, "--to", other]) == 0
    assert not encoded
    assert migration.read(run_dir).comparison == result.comparison


def test_a_killed_migration_resumes_without_encoding_twice(run, encoded):
    run_dir, other = run
    process = subprocess.run(
        [sys.executable, "-c", KILLED, "migrate", "--run", run_dir, "--to", other],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()[-2000:]
    records = [json.loads(path.read_text()) for path in Path(run_dir).glob("encode/*/_work/parts/*.json")]
    assert 0 < len(records) <= 6
    assert migration.read(run_dir).comparison is None
    result = migrated(run_dir, other)
    assert len(encoded) == 24 - len(records)
    assert set(encoded.values()) == {1}
    table = pipeline.locate(result.after, "embeddings").table("embeddings", ["doc_id"])
    assert table["doc_id"].to_pylist() == [f"d{number:03d}" for number in range(96)]


def test_another_student_needs_no_encoding(run, encoded):
    run_dir, _ = run
    before = pipeline.load_run(run_dir)
    assert before.adopt is not None
    prepared = migration.begin(run_dir, before.adopt.path, ["index.nprobe=1"])
    table = migration.plan(prepared)
    assert ["stages to run", "index"] in [list(row) for row in table.rows]
    migration.build(prepared)
    assert not encoded


def test_a_config_file_gets_the_sections_that_runs_share(run, tmp_path):
    run_dir, other = run
    file = tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump({"adopt": {"path": other}, "distill": None, "index": {"nlist": 4}}))
    prepared = migration.begin(run_dir, str(file), ["index.nprobe=3"])
    assert prepared.after.dataset == prepared.before.dataset
    assert (prepared.after.index.nlist, prepared.after.index.nprobe) == (4, 3)
    assert prepared.after.quantize != prepared.before.quantize  # the file is a complete config
    assert prepared.after.run_dir == run_dir
    file.write_text(yaml.safe_dump({"adopt": {"path": other}, "dataset": {"documents_per_part": 8}}))
    with pytest.raises(ConfigError, match="has other documents than the run in"):
        migration.begin(run_dir, str(file))


def test_limits_of_texts_are_kept_for_the_new_model(run):
    run_dir, other = run
    pipeline.make_current(
        pipeline.load_run(run_dir).model_copy(
            update={
                "adopt": pipeline.load_run(run_dir).adopt.model_copy(
                    update={"document_max_length": 20, "query_prefix": "find: "}
                )
            }
        )
    )
    with pytest.raises(ArtifactError, match="run stage 'adopt' first"):  # run.yaml has another run now
        migration.begin(run_dir, other)
    after = migration._after(pipeline.load_run(run_dir), other, [])
    assert after.adopt.model_dump(exclude_defaults=True) == {"path": other, "document_max_length": 20}


def test_impossible_migrations_are_refused_before_work(run, tmp_path):
    run_dir, other = run
    with pytest.raises(ConfigError, match="no run at"):
        migration.begin(str(tmp_path / "nowhere"), other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty"):
        migration.begin(run_dir, str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="no config file at"):
        migration.begin(run_dir, str(tmp_path / "nothing.yaml"))
    before = pipeline.load_run(run_dir)
    assert before.adopt is not None
    with pytest.raises(ConfigError, match="there is nothing to migrate"):
        migration.begin(run_dir, before.adopt.path)
    with pytest.raises(ConfigError, match=r"serve\.live differs"):
        migration.begin(run_dir, other, [f"serve.live.folder={tmp_path}/live"])
    live = LiveServe(folder=str(tmp_path / "live"), delta=True)
    pipeline.make_current(before.model_copy(update={"serve": ServeConfig(live=live)}))
    with pytest.raises(ConfigError, match=r"serve\.live takes writes that the data set does not hold"):
        migration.begin(run_dir, other)
    with pytest.raises(ConfigError, match="no other model was compared in"):
        migration.read(run_dir)


def test_a_missing_model_ends_with_one_line(run, capsys, monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["migrate", "--run", run[0], "--to", "no/such-model"]) == 2
    assert "'no/such-model' is neither a folder nor a model" in capsys.readouterr().err


def test_queries_of_the_access_log_are_preferred(run, encoded, tmp_path):
    run_dir, other = run
    logs = tmp_path / "logs"
    logs.mkdir()
    logged = ["bakoli", "bakoli", "menura"]
    lines = [access_lines.line(query=query) for query in logged]
    lines += [access_lines.line(query="refused", status=422), access_lines.line(query=None), b"torn"]
    lines.append(access_lines.line(query="similar", path="/similar"))
    (logs / "access-gateway.jsonl").write_bytes(b"".join(lines))
    result = migrated(run_dir, other, f"serve.access_log={logs}")
    assert result.after.serve.access_log == str(logs)
    report = open_artifact(str(result.comparison), kind="comparison").read_json("report.json")
    assert report["queries"] == {"source": f"the access log in {logs}", "count": 3}
    assert {row["query"] for row in report["changed"]} == {"bakoli", "menura"}  # each query once
    assert sorted(pair_comparison.log_queries(str(logs), most=2)) in ([*logged[:2]], sorted(logged[1:]))
    with pytest.raises(DataError, match="no file at"):
        pair_comparison.log_queries(str(tmp_path / "nothing"))
