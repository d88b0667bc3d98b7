import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from scalingnote import cli, doctor, pipeline, stages
from scalingnote.config import Config
from scalingnote.errors import DataError
from scalingnote.quantize import semantic_id
from scalingnote.run_config import RunConfig
from scalingnote.storage.artifact import Draft, open_artifact

ROOT = Path(cli.__file__).parents[1]
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


def modules_after(statement: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after `statement`."""
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "ray", "faiss", "transformers", "pyarrow", "numpy"}


@pytest.mark.parametrize(
    ("arguments", "unneeded"), [(["--help"], HEAVY | {"pydantic", "yaml"}), (["plan", "--help"], HEAVY)]
)
def test_help_needs_no_heavy_module(arguments, unneeded):
    statement = f"import scalingnote.cli\ntry: scalingnote.cli.main({arguments})\nexcept SystemExit: pass"
    assert not modules_after(statement) & unneeded


def test_configs_need_no_heavy_module():
    found = sorted((ROOT / "scalingnote").glob("*/config.py"))
    assert len(found) >= 9
    names = ", ".join(f"scalingnote.{path.parent.name}.config" for path in found)
    assert not modules_after(f"import {names}") & HEAVY


def test_the_pipeline_needs_neither_torch_nor_ray():
    assert not modules_after("import scalingnote.pipeline") & {"torch", "ray", "faiss", "transformers"}


def test_what_serves_starts_without_torch_unless_a_tower_needs_it():
    parts = ("app", "artifacts", "replicas", "writer")
    statement = "import " + ", ".join(f"scalingnote.serve.{part}" for part in parts)
    assert not modules_after(statement) & {"torch", "transformers"}


def test_every_stage_has_an_entrypoint_in_jobs():
    others = {"__init__", "entrypoint", "experiment", "ingest", "ladder", "run"}
    assert {path.stem for path in (Path(__file__).parents[1] / "jobs").glob("*.py")} - others == {
        *stages.NAMES
    }


def test_a_typo_ends_with_a_suggestion_and_no_traceback(config, capsys):
    assert cli.main(["run", str(config), "--set", "trian.epochs=1"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "did you mean 'train'" in complaint
    assert str(config) in complaint


def test_debugging_shows_the_traceback(config, monkeypatch):
    monkeypatch.setenv("SCALINGNOTE_DEBUG", "1")
    with pytest.raises(cli.ScalingNoteError):
        cli.main(["run", str(config), "--set", "nonsense"])


@pytest.mark.parametrize("override", ["nonsense", "=1", "train.epochs=many"])
def test_an_override_that_makes_no_sense_is_refused(config, capsys, override):
    assert cli.main(["prepare", str(config), "--set", override]) == 2
    assert capsys.readouterr().err.startswith("scalingnote: ")


def test_an_unknown_stage_is_answered_with_the_nearest(config, capsys):
    assert cli.main(["run", str(config), "--only", "quantise"]) == 2
    assert "did you mean 'quantize'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["submit", "quantise", str(config), "--address", "http://127.0.0.1:1"])
    assert stopped.value.code == 2


def test_a_stage_without_its_inputs_says_which_stage_to_run(config, capsys):
    assert cli.main(["quantize", str(config)]) == 2
    assert "run stage 'prepare' first" in capsys.readouterr().err


def test_later_files_and_overrides_reach_the_stage(config, tmp_path, monkeypatch, capsys):
    method = tmp_path / "method.yaml"
    method.write_text("quantize: {levels: 3, codes: 32}\n")
    seen = []
    monkeypatch.setattr(pipeline, "run", lambda config, chosen: seen.append((config, chosen)) or ARTIFACTS)
    assert cli.main(["quantize", str(config), str(method), "--set", "quantize.codes=64"]) == 0
    ((resolved, chosen),) = seen
    assert (resolved.quantize.levels, resolved.quantize.codes) == (3, 64)
    assert [stage.name for stage in chosen] == ["quantize"]
    assert "semantic_ids  somewhere" in capsys.readouterr().out


class Located:
    uri = "somewhere"


ARTIFACTS = {"semantic_ids": Located()}


def test_ids_shows_what_lies_under_a_prefix(tmp_path, monkeypatch, capsys):
    draft = Draft(str(tmp_path), kind="semantic_ids", config=Config(), parents={})
    codes = np.array([[3, 1], [3, 2], [3, 2], [5, 0]], np.uint16)
    names, suffix = pa.array(["a", "b", "c", "d"]), np.array([0, 0, 1, 0], np.int32)
    draft.write_table("by_code/part-00000.arrow", semantic_id.sorted_table(names, codes, suffix))
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
    assert "is no prefix here" in capsys.readouterr().err


def test_from_and_until_bound_the_stages(config, monkeypatch):
    seen = []
    monkeypatch.setattr(pipeline, "run", lambda config, chosen: seen.append(chosen) or ARTIFACTS)
    assert cli.main(["run", str(config), "--from", "encode", "--until", "index"]) == 0
    assert [stage.name for stage in seen[0]] == ["encode", "quantize", "index"]


def test_interruption_has_its_own_exit_code(config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    assert cli.main(["prepare", str(config)]) == 130


def test_an_error_of_a_remote_task_is_told_without_its_traceback(config, monkeypatch, capsys):
    class RemoteError(DataError):  # the shape in which Ray hands an error of a task to the driver
        cause = DataError("no usable row: check the columns")

    def failing(*_):
        raise RemoteError("ray::task()\n  File 'x.py', line 1\n ...")

    monkeypatch.setattr(pipeline, "run", failing)
    assert cli.main(["prepare", str(config)]) == 2
    assert capsys.readouterr().err == "scalingnote: no usable row: check the columns\n"


def test_search_wants_a_run(tmp_path, capsys):
    assert cli.main(["search", "text", "--run", str(tmp_path)]) == 2
    assert "scalingnote run CONFIG" in capsys.readouterr().err
    assert cli.main(["search", "  ", "--run", str(tmp_path)]) == 2


def test_compare_refuses_methods_of_different_run_dirs(config, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text("run_dir: elsewhere\n")
    assert cli.main(["compare", str(config), "--methods", str(config), str(other)]) == 2
    assert "elsewhere" in capsys.readouterr().err


def test_compare_lays_the_reports_of_all_methods_together(config, tmp_path, monkeypatch, capsys):
    reports, seeds = {}, []
    for name in ("one", "two"):
        draft = Draft(
            str(tmp_path / name), kind="report", config=RunConfig.model_validate(MINIMAL), parents={}
        )
        draft.write_json("report.json", {"name": name})
        draft.commit(counts={})
        reports[name] = open_artifact(str(tmp_path / name), kind="report")
        (tmp_path / f"{name}.yaml").write_text(f"evaluate: {{names: {{student: {name}}}}}\n")

    def run(config, record):
        seeds.append((config.train.seed, config.distill.seed))
        return {"report": reports[config.evaluate.names.student]}

    monkeypatch.setattr(pipeline, "run", run)
    monkeypatch.setattr(
        "scalingnote.evaluate.report.merge_artifacts",
        lambda all_: {"merged": [[one.read_json("report.json") for one in seeds] for seeds in all_]},
    )
    monkeypatch.setattr(
        "scalingnote.evaluate.report.comparison_table", lambda merged: f"| {len(merged['merged'])} methods |"
    )
    methods = [str(tmp_path / f"{name}.yaml") for name in reports]
    assert cli.main(["compare", str(config), "--methods", *methods, "--set", "distill.seed=5"]) == 0
    merged = json.loads((tmp_path / "runs" / "compare.json").read_text())
    assert merged == {"merged": [[{"name": "one"}] * 3, [{"name": "two"}] * 3]}
    assert seeds == [(0, 5), (1, 6), (2, 7)] * 2
    assert cli.main(["compare", str(config), "--methods", *methods, "--seeds", "1"]) == 0
    assert len(seeds) == 8
    assert cli.main(["compare", str(config), "--methods", *methods, "--seeds", "0"]) == 2
    assert (tmp_path / "runs" / "compare.md").read_text() == "| 2 methods |\n"
    assert "| 2 methods |" in capsys.readouterr().out


MINIMAL = {"dataset": {"name": "medquad"}}


def test_datasets_are_listed_and_described(capsys, monkeypatch):
    monkeypatch.delenv("SCALINGNOTE_DATA", raising=False)
    assert cli.main(["datasets", "list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()][:2] == ["python_docs", "medquad"]
    assert cli.main(["datasets", "describe", "medquad"]) == 0
    assert "licence" in capsys.readouterr().out
    assert cli.main(["datasets", "describe", "medquat"]) == 2
    assert cli.main(["datasets", "fetch"]) == 2


def test_doctor_finds_this_machine_fit(capsys):
    code = cli.main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == int(any(finding["level"] == "stops" for finding in findings))
    by_subject = {finding["subject"]: finding for finding in findings}
    assert {"machine", "python", "packages", "ray", "bfloat16", "memory", "disk", "datasets"} <= set(
        by_subject
    )
    assert by_subject["packages"]["level"] == "ok"
    assert all(finding["remedy"] for finding in findings if finding["level"] != "ok")


def test_doctor_stops_at_a_data_directory_that_is_not_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SCALINGNOTE_DATA", str(tmp_path / "missing"))
    assert cli.main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "missing is no directory" in told
    assert "-> correct it" in told
    assert told.endswith("1 findings stop a run\n")


def test_doctor_names_a_package_that_is_too_old(monkeypatch):
    real = doctor.importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "1.0" if name == "pydantic" else real(name)
    )
    stops = [finding for finding in doctor.examine() if finding.level == "stops"]
    assert [finding.found for finding in stops] == ["pydantic is 1.0, wanted >=2.14"]
    assert "pip install 'pydantic>=2.14'" in stops[0].remedy


def test_doctor_notices_a_cluster_it_would_join(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (finding,) = [f for f in doctor.examine() if f.subject == "RAY_ADDRESS"]
    assert (finding.level, finding.found) == ("warn", "10.0.0.1:6379")


@pytest.mark.parametrize(
    ("given", "file", "warned"),
    [
        ({}, "", True),
        ({"RAY_AUTH_MODE": "token"}, "", True),  # it asks for a token that nobody has
        ({"RAY_AUTH_TOKEN": "secret"}, "", False),
        ({"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"}, "", True),
        ({}, ".ray/auth_token", False),
        ({"RAY_AUTH_TOKEN_PATH": "HOME/own"}, "own", False),
        ({"RAY_AUTH_TOKEN_PATH": "HOME/own"}, ".ray/auth_token", True),
    ],
)
def test_doctor_warns_of_a_cluster_without_tokens(given, file, warned, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("RAY_AUTH_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value.replace("HOME", str(tmp_path)))
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("secret")
    assert "RAY_AUTH_MODE" not in {f.subject for f in doctor._clusters()}  # a private cluster has its own
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = [f for f in doctor._clusters() if f.subject == "RAY_AUTH_MODE"]
    assert [f.level for f in found] == ["warn"] * warned


def test_a_closed_pipe_is_no_error():
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = f"{sys.executable} -m scalingnote.cli datasets list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
