import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from scalingnote.cli import doctor
from scalingnote.cli import main as cli
from scalingnote.core.config import Config
from scalingnote.core.errors import DataError
from scalingnote.datasets.sources import SUMMARIES
from scalingnote.evaluate import merge
from scalingnote.quantize import semantic_id
from scalingnote.run import pipeline, stages
from scalingnote.storage.artifact import Draft

ROOT = Path(cli.__file__).parents[2]
DATASET = """
dataset:
  name: columns
  documents: {path: DIR/documents.jsonl}
  queries: {path: DIR/queries.jsonl}
  qrels: {path: DIR/qrels.jsonl}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "dataset.yaml"
    path.write_text(DATASET.replace("DIR", str(tmp_path)) + f"run_dir: {tmp_path}/runs\n")
    return path


def test_every_job_is_a_command_with_its_options():
    scripts = [path for path in (ROOT / "jobs").glob("*.py") if path.stem not in ("__init__", "job")]
    assert len(scripts) == 8
    for path in scripts:
        command = ast.literal_eval(re.findall(r"job\((.*?)\)", path.read_text())[-1] + ",")
        options = cli._parser().parse_args([*command, "x.yaml", "--json"])
        assert options.json
        assert getattr(options, "only", None) in (None, path.stem)
        assert path.stem in stages.NAMES or path.stem == command[0]


WRONG: list[tuple[list[str], str]] = [
    (["run", "CONFIG", "--set", "trian.epochs=1"], "did you mean 'train'"),
    (["run", "CONFIG", "--set", "nonsense"], "not of the form a.b=value"),
    (["run", "CONFIG", "--set", "=1"], "not of the form a.b=value"),
    (["run", "CONFIG", "--set", "train.epochs=many"], "train.epochs: "),
    (["run", "CONFIG", "--gpus", "16"], "add --dry-run"),
    (["run", "CONFIG", "--dry-run", "--gpu", "B1"], "'A100'"),
    (["run", "CONFIG", "--only", "quantise"], "did you mean 'quantize'"),
    (["run", "CONFIG", "--only", "quantize"], "run stage 'prepare' first"),
    (
        ["submit", "CONFIG", "--only", "mime", "--address", "http://127.0.0.1:1"],
        "no stage 'mime' in this run",
    ),
    (["submit", "CONFIG", "--address", "http://127.0.0.1:9"], "no Ray cluster answers at http://127.0.0.1:9"),
    (["search", "text", "--run", "nowhere"], "scalingnote run CONFIG"),
    (["search", "  ", "--run", "nowhere"], "nothing to search"),
    (["compare", "CONFIG", "--methods", "CONFIG", "OTHER"], "elsewhere"),
    (["compare", "CONFIG", "--methods", "CONFIG", "--seeds", "0"], "--seeds is 0"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_input_ends_with_one_line_and_code_2(words, message, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # not a checkout
    (tmp_path / "other.yaml").write_text("run_dir: elsewhere\n")
    places = {"CONFIG": str(config), "OTHER": str(tmp_path / "other.yaml"), "nowhere": str(tmp_path / "no")}
    assert cli.main([places.get(word, word) for word in words]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("scalingnote: ")
    assert message in errors[-1]


def test_the_help_of_a_run_lists_stages_and_kinds_of_data_sets(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    steps, kinds = capsys.readouterr().out.partition("stages:")[2].split("data sets, by dataset.name:")
    assert [line.split()[0] for line in steps.strip().splitlines()] == [*stages.NAMES]
    assert [line.split()[0] for line in kinds.strip().splitlines()] == [*SUMMARIES]


def test_later_files_and_overrides_reach_the_stage(config, tmp_path, monkeypatch, capsys):
    method = tmp_path / "method.yaml"
    method.write_text("quantize: {levels: 3, codes: 32}\n")
    calls = []
    monkeypatch.setattr(pipeline, "run", lambda config, chosen: calls.append((config, chosen)) or ARTIFACTS)
    arguments = ["run", str(config), str(method), "--only", "quantize", "--set", "quantize.codes=64"]
    assert cli.main([*arguments, "--json"]) == 0
    ((resolved, chosen),) = calls
    assert (resolved.quantize.levels, resolved.quantize.codes) == (3, 64)
    assert [stage.name for stage in chosen] == ["quantize"]
    first_line, line = capsys.readouterr().out.splitlines()
    assert first_line == "semantic_ids  somewhere"
    assert json.loads(line) == {"kind": "semantic_ids", "uri": "somewhere", "digest": "d", "counts": {}}


class Located:
    uri, digest, counts = "somewhere", "d", {}
    manifest = SimpleNamespace(kind="semantic_ids")


ARTIFACTS = {"semantic_ids": Located()}


def test_ids_lists_the_documents_under_a_prefix(tmp_path, monkeypatch, capsys):
    draft = Draft(str(tmp_path), kind="semantic_ids", config=Config(), parents={})
    columns = {"doc_id": ["a", "b", "c", "d"], "suffix": pa.array([0, 0, 1, 0], pa.int32())}
    columns["code_0"] = pa.array([3, 3, 3, 5], pa.uint16())
    columns["code_1"] = pa.array([1, 2, 2, 0], pa.uint16())
    draft.write_table("by_code/part-00000.arrow", pa.table(columns))
    ends = {"first": [3, 1], "last": [5, 0]}
    draft.write_json(semantic_id.BY_CODE_SUMMARY, [{"name": "by_code/part-00000.arrow", "rows": 4, **ends}])
    codebooks = np.zeros((2, 8, 4), np.float32)
    draft.write_bytes("codebooks.safetensors", safetensors.numpy.save({"codebooks": codebooks}))
    artifact = draft.commit(counts={})
    monkeypatch.setattr(pipeline, "load_run", lambda run_dir: None)
    monkeypatch.setattr(pipeline, "locate", lambda config, kind: artifact)
    assert cli.main(["ids", "3", "-k", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 documents under 3",
        "  3-1-0  a",
        "  3-2-0  b",
        "2 next codes",
        "  3-2  2 documents",
        "  3-1  1 documents",
    ]
    assert cli.main(["ids", "3-2-1-7"]) == 2
    assert "is not a prefix" in capsys.readouterr().err


def test_interruption_has_its_own_exit_code(config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    assert cli.main(["run", str(config)]) == 130


def test_an_error_of_a_remote_task_has_no_traceback(config, monkeypatch, capsys):
    class RemoteError(DataError):  # like the error of a task that Ray raises in the driver
        cause = DataError("no usable row: check the columns")

    def failing(*_):
        raise RemoteError("ray::task()\n  File 'x.py', line 1\n ...")

    monkeypatch.setattr(pipeline, "run", failing)
    assert cli.main(["run", str(config)]) == 2
    assert capsys.readouterr().err == "scalingnote: no usable row: check the columns\n"


def test_compare_merges_the_reports_of_all_methods(config, tmp_path, monkeypatch, capsys):
    reports, seeds = {}, []
    for name in ("one", "two"):
        draft = Draft(str(tmp_path / name), kind="report", config=Config(), parents={})
        draft.write_json("report.json", {"name": name})
        reports[name] = draft.commit(counts={})
        (tmp_path / f"{name}.yaml").write_text(f"evaluate: {{names: {{student: {name}}}}}\n")

    def run(config, record):
        seeds.append((config.train.seed, config.distill.seed))
        return {"report": reports[config.evaluate.names.student]}

    def merged_names(methods):
        return {"merged": [[one.read_json("report.json") for one in of_seeds] for of_seeds in methods]}

    monkeypatch.setattr(pipeline, "run", run)
    monkeypatch.setattr(merge, "merge_artifacts", merged_names)
    monkeypatch.setattr(merge, "comparison", lambda merged: [f"| {len(merged['merged'])} methods |"])
    methods = [str(tmp_path / f"{name}.yaml") for name in reports]
    assert cli.main(["compare", str(config), "--methods", *methods, "--set", "distill.seed=5"]) == 0
    merged = json.loads((tmp_path / "runs" / "compare.json").read_text())
    assert merged == {"merged": [[{"name": "one"}] * 3, [{"name": "two"}] * 3]}
    assert seeds == [(0, 5), (1, 6), (2, 7)] * 2
    assert cli.main(["compare", str(config), "--methods", *methods, "--seeds", "1"]) == 0
    assert len(seeds) == 8
    assert (tmp_path / "runs" / "compare.md").read_text() == "| 2 methods |\n"
    assert "| 2 methods |" in capsys.readouterr().out


def test_doctor_accepts_this_machine(capsys):
    code = cli.main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == int(any(finding["level"] == "stops" for finding in findings))
    by_subject = {finding["subject"]: finding for finding in findings}
    assert {"machine", "python", "packages", "ray", "bfloat16", "memory", "disk"} <= set(by_subject)
    assert by_subject["packages"]["level"] == "ok"
    assert all(finding["remedy"] for finding in findings if finding["level"] != "ok")


def test_doctor_stops_at_a_package_that_is_too_old(monkeypatch, capsys):
    real = doctor.importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "1.0" if name == "pydantic" else real(name)
    )
    stops = [finding for finding in doctor.examine() if finding.level == "stops"]
    assert [finding.found for finding in stops] == ["pydantic is 1.0, required >=2.14"]
    assert "pip install 'pydantic>=2.14'" in stops[0].remedy
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("1 findings stop a run\n")


@pytest.mark.parametrize(
    ("variables", "file", "warned"),
    [
        ({}, "", True),
        ({"RAY_AUTH_MODE": "token"}, "", True),  # a token is required, and there is none
        ({"RAY_AUTH_TOKEN": "secret"}, "", False),
        ({"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"}, "", True),
        ({}, ".ray/auth_token", False),
        ({"RAY_AUTH_TOKEN_PATH": "HOME/token"}, "token", False),
        ({"RAY_AUTH_TOKEN_PATH": "HOME/token"}, ".ray/auth_token", True),
    ],
)
def test_doctor_warns_about_a_cluster_without_tokens(variables, file, warned, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("RAY_AUTH_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("HOME", str(tmp_path)))
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("secret")
    assert "RAY_AUTH_MODE" not in {f.subject for f in doctor._clusters()}  # a private cluster creates a token
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    findings = [f for f in doctor._clusters() if f.subject == "RAY_AUTH_MODE"]
    assert [f.level for f in findings] == ["warn"] * warned


def test_a_closed_pipe_is_not_an_error():
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    sizes = "--documents 1e6 --tokens 100 --model Qwen/Qwen2.5-0.5B --qps 10"
    command = f"{sys.executable} -m scalingnote.cli.main plan {sizes} | head -1; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert (process.returncode, process.stderr) == (0, "")
