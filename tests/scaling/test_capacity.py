import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from scalingnote import cli
from scalingnote.index.config import IndexConfig
from scalingnote.models.flops import PUBLISHED
from scalingnote.scaling import capacity, constants, plan_command
from scalingnote.scaling.capacity import CapacityPlan
from scalingnote.scaling.config import PlanConfig
from scalingnote.scaling.constants import Constant, IndexFamily, Ledger, MeasuredSource, StatedSource
from scalingnote.serve_config import ServeConfig

ROOT = Path(cli.__file__).parents[1]
MODEL = "Qwen/Qwen2.5-7B-Instruct"


CONFIG = PlanConfig(documents=10**9, tokens=250, model=MODEL, qps=1000)


def plan(**given: object) -> CapacityPlan:
    return capacity.plan(
        PlanConfig(**{"documents": 10**9, "tokens": 250, "model": MODEL, "qps": 1000} | given)
    )


def all_constants() -> list[Constant]:
    found = [one for one in vars(constants).values() if isinstance(one, Constant)]
    found += constants.ENCODERS.values()
    for family in constants.FAMILIES:
        values = (getattr(family, field.name) for field in fields(IndexFamily))
        found += [value for value in values if isinstance(value, Constant)]
    return found


def in_file(source: MeasuredSource) -> float:
    table = json.loads((ROOT / source.file).read_text())[source.table]
    if not source.where:
        return table[source.key]
    (row,) = (row for row in table if all(row[name] == value for name, value in source.where))
    return row[source.key]


@pytest.mark.parametrize(
    "constant",
    [one for one in all_constants() if isinstance(one.source, MeasuredSource)],
    ids=lambda one: str(one.source),
)
def test_a_measured_constant_is_what_its_benchmark_wrote(constant: Constant):
    assert constant.value == in_file(constant.source)


def test_every_constant_of_a_plan_has_a_source_and_none_is_used_in_two_senses():
    found = plan(qps=30_000, recall=0.7)
    names = [constant.name for constant in found.constants]
    assert len(names) == len(set(names))
    assert any(isinstance(constant.source, MeasuredSource) for constant in found.constants)
    text = plan_command.explanation(found)
    for constant in found.constants:
        assert f"  {constant.name} = " in text
        assert f"[{constant.source}]" in text
    given = {
        one.name
        for one in found.constants
        if isinstance(one.source, StatedSource) and one.source.kind == "given"
    }
    assert given == {"documents", "tokens", "queries a second"}
    assert "never" not in plan_command.as_text(found)
    assert "MFU 0.4: share of the GPU's peak that is reached; nobody measured it" in plan_command.as_text(
        found
    )


def test_what_is_designed_elsewhere_is_still_so():
    assert constants.VERSIONS.value == ServeConfig.model_fields["versions_kept"].default
    assert IndexConfig.model_fields["train_documents"].default == capacity.MAX_TRAIN_DOCUMENTS
    # Codes of 4 bits for every two dimensions, a byte a dimension, an id, a share of 4,000 centroids.
    default = constants.FAMILIES[0]
    assert default.size.value == pytest.approx(128 / 4 + 128 + 8 + 4000 * 128 * 4 / 1e6, abs=0.1)
    assert default.width.value == 1 / 4 + 1


def test_a_ledger_evaluates_the_formula_it_prints():
    ledger = Ledger(CONFIG)
    for name, value in (("a", 2.0), ("b, c", 3.0), ("unused", 5.0)):
        ledger.add(Constant(name, value, "", StatedSource("given", "a test")))
    ledger.add(Constant("d", 2.5, "", StatedSource("counted", "from b")), "b, c")
    cases = {
        "({a} + {b, c}) × {b, c}": 15.0,
        "{a} / ({b, c} × {a})": 1 / 3,
        "{a} - ({b, c} - {a})": 1.0,
        "{a} / max({b, c}, ceil({d} / {a}))": 2 / 3,
        "sqrt({a} + {b, c}) / 1,000": math.sqrt(5) / 1000,
    }
    for formula, value in cases.items():
        assert ledger.step("result", "", formula) == pytest.approx(value)
        assert ledger.steps[-1].names == re.sub("[{}]", "", formula)
    assert ledger.steps[0].numbers == "(2 + 3) × 3"
    assert [one.name for one in ledger.constants] == ["a", "b, c", "d"]
    assert ledger.step("twice", "", "{result} × 2") == 2 * ledger.steps[-2].value
    ledger.add(Constant("whole", 3 * (1 + 1e-15), "", StatedSource("given", "a test")))
    assert ledger.step("no rounding error", "", "ceil({whole})") == 3.0


def test_every_step_of_a_plan_is_the_arithmetic_it_prints():
    python = {"ceil": math.ceil, "sqrt": math.sqrt, "max": max}
    for step in plan(recall=0.97, dims=(64, 256), qps=777.0).steps:
        computed = eval(step.numbers.replace("×", "*").replace(",", "").replace("max(2 ", "max(2, "), python)
        # Printed numbers have four figures, and a whole number may fall on the other side of one.
        rough = 1.0 if "ceil(" in step.numbers else 2e-3 * abs(step.value)
        assert computed == pytest.approx(step.value, abs=rough), step


def test_more_of_anything_never_costs_less():
    base = plan()
    for more in (
        {"documents": 2 * 10**9},
        {"qps": 50_000},
        {"recall": 0.971},
        {"tokens": 500},
        {"pairs": 10**9},
    ):
        found = plan(**more)
        assert (found.once, found.month) >= (base.once, base.month)
        assert found.once > base.once or found.month > base.month
    assert plan(gpus=64).phases[0].gpu_hours == base.phases[0].gpu_hours
    assert plan(gpus=64).phases[0].days == base.phases[0].days / 8
    assert plan(lora=16).phases[0].operations < base.phases[0].operations
    assert plan(query_tower="lookup").serving[0].count < base.serving[0].count


@pytest.mark.parametrize("tower", ["bert-int8", "lookup"])
def test_query_encoders_are_as_many_as_their_tokens_ask_for(tower: str):
    few, more, many = (
        plan(query_tokens=tokens, query_tower=tower, qps=1e6)
        for tokens in (4, constants.ENCODER_TOKENS.value, 256)
    )
    rate = constants.ENCODERS[tower].value
    # At the length that was measured, the rate that was measured.
    assert more.serving[0].count == math.ceil(1e6 / rate / constants.BUSY.value)
    assert few.serving[0].count == pytest.approx(more.serving[0].count * 4 / 12.953125, rel=0.03)
    assert many.serving[0].count == pytest.approx(more.serving[0].count * 256 / 12.953125, rel=0.01)


def test_the_recall_chooses_among_what_was_measured():
    # Many queries: the fastest. Few: the one that takes the least memory. Little recall: codes alone.
    assert plan(recall=0.962, qps=50_000).index.family.label == "ivfpq_fast_scan + sq8"
    assert plan(recall=0.962, qps=10).index.family.label == "ivf_sq8"
    assert plan(recall=0.7, qps=10).index.family.label == "ivfpq_fast_scan"
    assert plan(recall=0.97, qps=50_000).index.family.label == "ivfpq_fast_scan + flat"
    assert plan(recall=0.971).index.family.label == "ivfpq_fast_scan + flat"
    exact = plan(recall=0.99)
    assert exact.index.family.label == "flat"
    assert any("measured up to 0.971" in note for note in exact.notes)
    # Each document is compared: twice the documents, twice the time.
    twice = plan(recall=0.99, documents=2 * 10**9)
    times = [
        next(step.value for step in one.steps if step.name == "scan of a query, one core")
        for one in (exact, twice)
    ]
    assert times[1] == 2 * times[0]


def test_notes_name_what_does_not_fit_and_what_nobody_measured():
    notes = " ".join(plan(gpus=1, gpu="L4", model="Qwen/Qwen2.5-14B").notes)
    assert "TRAINING DOES NOT FIT" in notes
    assert "--lora 16" in notes
    assert "ENCODING DOES NOT FIT: weights in bfloat16 take 26 GiB of an L4's 22" in notes
    fits = " ".join(plan(gpus=64, gpu="H200").notes)
    assert "FIT" not in fits
    assert "assumed to keep it" in fits
    assert "126,488 lists: set index.train_documents=4933032" in fits
    assert "lists" not in " ".join(plan(documents=5 * 10**8).notes)
    assert "a gateway searches by itself" in " ".join(plan(documents=10**6).notes)
    assert "dimensions" not in fits
    assert "recall was measured at 128 dimensions, with 8 nobody" in " ".join(plan(dims=(8,)).notes)
    assert "dimensions" not in " ".join(plan(dims=(8,), recall=0.99).notes)  # exact at any


def test_what_was_measured_on_other_machines_says_so():
    assert "[measured on CPUs: docs/results/encode.json" in plan_command.explanation(plan())


def test_a_folder_with_a_config_is_planned_for(tmp_path, capsys):
    shape = PUBLISHED["Qwen/Qwen2.5-0.5B"]
    settings = {
        "model_type": "qwen2",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    known = plan(model="Qwen/Qwen2.5-0.5B").once
    assert plan(model=str(tmp_path)).once == plan(model=str(tmp_path / "config.json")).once == known
    arguments = ["plan", "--documents", "1e7", "--tokens", "250", "--qps", "10", "--model"]
    file = tmp_path / "out" / "plan.json"
    assert cli.main([*arguments, str(tmp_path), "--explain", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "[measured: docs/results/index.json" in printed
    written = json.loads(file.read_text())
    assert written["plan"]["once"] == pytest.approx(plan(documents=10**7, qps=10, model=str(tmp_path)).once)
    assert {"steps", "constants"} < set(written)
    assert all(constant["source"] for constant in written["constants"])
    assert cli.main([*arguments, "nobody/knows"]) == 2
    complaint = capsys.readouterr().err
    assert "known offline: " in complaint
    assert "folder that holds one" in complaint


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--qps", "0"], "qps"),
        (["--documents", "10.5"], "documents"),
        (["--tokens", "nan"], "tokens"),
        (["--qps", "inf"], "qps"),
        (["--gpu", "H20"], "'H200'"),
        (["--recall", "1.1"], "recall"),
        (["--dims", "64", "32"], "must ascend"),
        (["--node-memory", "8"], "greater than or equal to 16"),
    ],
)
def test_a_knob_out_of_bounds_is_named(wrong, says, capsys):
    arguments = ["plan", "--documents", "1e7", "--tokens", "250", "--qps", "10", "--model", MODEL, *wrong]
    assert cli.main(arguments) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("scalingnote: plan: ")
    assert complaint.count("\n") == 1
    assert says in complaint


def test_help_names_the_defaults_of_the_knobs(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for name, field in PlanConfig.model_fields.items():
        option = f"--{name.replace('_', '-')} "
        assert option in printed
        if field.default is not None and not field.is_required():
            values = field.default if isinstance(field.default, tuple) else (field.default,)
            said = printed.rpartition(option)[2][:140]
            assert all(
                f"{value:g}" in said.replace("1e8", "1e+08")
                if isinstance(value, float | int)
                else value in said
                for value in values
            ), name
