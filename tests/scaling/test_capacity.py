import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import scale
from scalingnote import cli
from scalingnote.index.config import IndexConfig
from scalingnote.mine import search
from scalingnote.models.flops import PUBLISHED
from scalingnote.scaling import capacity, config, output
from scalingnote.scaling.capacity import AXES, FIGURES, VECTOR_STAGES, CapacityPlan, measured, predict
from scalingnote.scaling.config import Constant, IndexFamily, PlanConfig
from scalingnote.serve_config import ServeConfig

ROOT = Path(cli.__file__).parents[1]
MODEL = "Qwen/Qwen2.5-7B-Instruct"


def plan(**given: object) -> CapacityPlan:
    return capacity.plan(
        PlanConfig(**{"documents": 10**9, "tokens": 250, "model": MODEL, "qps": 1000} | given)
    )


def all_constants() -> list[Constant]:
    found = [one for one in vars(config).values() if isinstance(one, Constant)]
    found += config.ENCODERS.values()
    for family in config.FAMILIES:
        values = (getattr(family, field.name) for field in fields(IndexFamily))
        found += [value for value in values if isinstance(value, Constant)]
    return found


@pytest.mark.parametrize(
    "constant", [one for one in all_constants() if one.file], ids=lambda one: str(one.source)
)
def test_a_measured_constant_is_what_its_benchmark_wrote(constant: Constant):
    table = json.loads((ROOT / "docs/results" / constant.file).read_text())[constant.table]
    if constant.row:
        (table,) = (row for row in table if all(row[name] == value for name, value in constant.row))
    assert constant.value == table[constant.key]
    assert constant.source.startswith("measured")


def test_every_constant_of_a_plan_has_a_source_and_none_is_used_in_two_senses():
    found = plan(qps=30_000, recall=0.7)
    names = [constant.name for constant in found.constants]
    assert len(names) == len(set(names))
    assert any(constant.file for constant in found.constants)
    text = output.explanation(found)
    for constant in found.constants:
        assert f"  {constant.name} = " in text
        assert f"[{constant.source}]" in text
    given = {one.name for one in found.constants if one.source.startswith("given")}
    assert given == {"documents", "tokens", "queries a second"}
    assert "MFU 0.4: share of the GPU's peak that is reached; measured so far" in output.plan_text(found)


def test_what_is_designed_elsewhere_is_still_so():
    assert config.VERSIONS.value == ServeConfig.model_fields["versions_kept"].default
    assert IndexConfig.model_fields["train_documents"].default == output.MAX_TRAIN_DOCUMENTS
    # Codes of 4 bits for every two dimensions, a byte a dimension, an id, a share of 4,000 centroids.
    default = config.FAMILIES[0]
    assert default.size.value == pytest.approx(128 / 4 + 128 + 8 + 4000 * 128 * 4 / 1e6, abs=0.1)
    assert default.width.value == 1 / 4 + 1


def evaluated(formula: str) -> float:
    """The value of a printed formula: numbers, operators and functions, without the names beside numbers."""
    formula = re.sub(r"(?<=\d),(?=\d{3})", "", formula.replace("×", "*"))
    parts = re.findall(r"\d[\d.]*(?:e-?\d+)?|[-+*/(),]|(?:ceil|max|sqrt)(?=\()", formula)
    return eval("".join(parts), {"ceil": math.ceil, "max": max, "sqrt": math.sqrt})


@pytest.mark.parametrize("more", [{}, {"query_tower": "lookup", "recall": 0.99}])
def test_every_step_of_a_plan_is_the_arithmetic_it_prints(more: dict[str, object]):
    found = plan(**{"recall": 0.97, "dims": (64, 256), "qps": 777.0} | more)
    assert len(found.steps) > 60
    for line in found.steps:
        _, formula, value = line.split(" = ")
        value = float(re.match(r"[\d,.]+(e-?\d+)?", value)[0].replace(",", ""))
        # Printed numbers have four figures, and a whole number may fall on the other side of one.
        rough = 1.0 if "ceil(" in formula else 2e-3 * abs(value)
        assert evaluated(formula) == pytest.approx(value, abs=rough), line


def test_a_rounding_error_adds_no_replica():
    assert capacity._round_up(3 * (1 + 1e-15)) == 3.0
    assert capacity._round_up(3.001) == 4.0


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
    assert plan(gpus=64).phases["train"]["gpu_hours"] == base.phases["train"]["gpu_hours"]
    assert plan(gpus=64).phases["train"]["days"] == base.phases["train"]["days"] / 8
    assert plan(lora=16).phases["train"]["operations"] < base.phases["train"]["operations"]
    assert (
        plan(query_tower="lookup").serving["query encoders"]["count"]
        < base.serving["query encoders"]["count"]
    )


@pytest.mark.parametrize("tower", ["bert-int8", "lookup"])
def test_query_encoders_are_as_many_as_their_tokens_ask_for(tower: str):
    few, more, many = (
        plan(query_tokens=tokens, query_tower=tower, qps=1e8).serving["query encoders"]["count"]
        for tokens in (4, config.ENCODER_TOKENS.value, 256)
    )
    # At the length that was measured, the rate that was measured.
    assert more == math.ceil(1e8 / config.ENCODERS[tower].value / config.BUSY.value)
    assert few == pytest.approx(more * 4 / config.ENCODER_TOKENS.value, rel=0.03)
    assert many == pytest.approx(more * 256 / config.ENCODER_TOKENS.value, rel=0.01)


def test_the_recall_chooses_among_what_was_measured():
    # Many queries: the fastest. Few: the one that takes the least memory. Little recall: codes alone.
    assert plan(recall=0.962, qps=50_000).family.label == "ivfpq_fast_scan + sq8"
    assert plan(recall=0.962, qps=10).family.label == "ivf_sq8"
    assert plan(recall=0.7, qps=10).family.label == "ivfpq_fast_scan"
    assert plan(recall=0.97, qps=50_000).family.label == "ivfpq_fast_scan + flat"
    assert plan(recall=0.971).family.label == "ivfpq_fast_scan + flat"
    exact = plan(recall=0.99)
    assert exact.family.label == "flat"
    assert any("measured up to 0.971" in note for note in output.notes(exact))
    # Each document is compared: twice the documents, twice the time.
    twice = plan(recall=0.99, documents=2 * 10**9)
    times = [one.sizes[64]["shard_ms"] * one.sizes[64]["shards"] for one in (exact, twice)]
    more = (config.FOUR_SHARDS.value - config.ONE_INDEX.value) / 3000
    times = [
        time - more * (one.sizes[64]["shards"] - 1) for time, one in zip(times, (exact, twice), strict=True)
    ]
    assert times[1] == pytest.approx(2 * times[0])


def test_notes_name_what_does_not_fit_and_what_nobody_measured():
    notes = " ".join(output.notes(plan(gpus=1, gpu="L4", model="Qwen/Qwen2.5-14B")))
    assert "TRAINING DOES NOT FIT" in notes
    assert "--lora 16" in notes
    assert "ENCODING DOES NOT FIT: weights in bfloat16 take 26 GiB of an L4's 22" in notes
    fits = " ".join(output.notes(plan(gpus=64, gpu="H200")))
    assert "FIT" not in fits
    assert "assumed to keep it" in fits
    assert "126,488 lists: set index.train_documents=4933032" in fits
    assert "lists" not in " ".join(output.notes(plan(documents=5 * 10**8)))
    assert "a gateway searches by itself" in " ".join(output.notes(plan(documents=10**6)))
    assert "dimensions" not in fits
    assert "recall was measured at 128 dimensions, with 8 nobody" in " ".join(output.notes(plan(dims=(8,))))
    assert "dimensions" not in " ".join(output.notes(plan(dims=(8,), recall=0.99)))  # exact at any


def test_what_was_measured_on_other_machines_says_so():
    assert "[measured on CPUs: docs/results/encode.json" in output.explanation(plan())


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


def row(documents: int, seconds: float, requests: int = 10) -> dict[str, float]:
    return dict.fromkeys(FIGURES, 1.0) | {
        "documents": documents,
        "seconds": seconds,
        "requests": requests,
    }


def test_a_prediction_lies_on_the_line_through_the_two_largest_sizes():
    rows = [row(10, 99.0), row(3_000, 8.0, 30), row(1_000, 4.0, 10)]
    found = predict(rows, documents=10_000)
    assert found["seconds"] == pytest.approx(2 + 10_000 * 0.002)
    assert found["fixed seconds"] == pytest.approx(2)
    assert found["requests"] == pytest.approx(100)
    assert found["driver GB"] == 1.0


def test_noise_of_a_stage_that_does_not_grow_predicts_no_negative_time():
    found = predict([row(1_000, 4.0), row(10_000, 3.5)], documents=10**9)
    assert (found["seconds"], found["fixed seconds"]) == (3.5, 3.5)


def product(stage: str, documents: int, count: int) -> dict[str, float | str]:
    """A run that takes 2 s, a ms a query, 0.1 ms a document and pass, and 1 µs a query and document."""
    axis = AXES[stage]
    taken = 2 + 1e-3 * count + documents * (1e-4 * axis.passes(count) + 1e-6 * count)
    return dict.fromkeys(FIGURES, taken) | {"stage": stage, "documents": documents, axis.name: count}


@pytest.mark.parametrize("stage", AXES)
@pytest.mark.parametrize(("documents", "count"), [(40_000, 400), (10**9, 30_000), (10**9, 10**7)])
def test_queries_and_codes_cost_by_themselves_and_for_each_document(stage, documents, count):
    axes = [product(stage, size, few) for size in (1_000, 4_000) for few in (20, 100)]
    rows = [product(stage, size, 20) for size in (100, 10_000, 100_000)]
    found = predict(rows, documents=documents, beside=axes, of=count)
    wanted = product(stage, documents, count)
    # The line holds the queries by themselves as fixed; passes are of what is not done for each of them.
    assert found["seconds"] == pytest.approx(wanted["seconds"], rel=0.01)
    assert found["requests"] == pytest.approx(wanted["requests"], rel=0.01)
    assert predict(rows, documents=documents)["seconds"] < 0.5 * wanted["seconds"]


def test_noise_on_an_axis_adds_no_negative_cost():
    axes = [
        product("mine", size, few) | {"seconds": 9.0 - few / 50}
        for size in (1_000, 4_000)
        for few in (20, 100)
    ]
    rows = [product("mine", size, 20) for size in (1_000, 10_000)]
    more = predict(rows, documents=10_000, beside=axes, of=10_000)["seconds"]
    assert more == pytest.approx(rows[-1]["seconds"])


def test_the_package_computes_with_what_the_benchmark_wrote():
    written = json.loads((ROOT / "docs/results/scale.json").read_text(encoding="utf-8"))
    for table in ("stages", "axes"):
        assert measured(table) == written[table]
    assert search.QUERIES_PER_BATCH == config.QUERIES_PER_PASS


@pytest.mark.parametrize("stage", AXES)
def test_the_measured_run_with_the_most_queries_or_codes_is_what_fewer_predict(stage):
    found = scale.over_run(measured("axes"), stage)
    assert 0.5 < found["plan over run"] < 2
    assert found["to"] >= 4 * found["from"]


def test_more_queries_and_codes_make_a_plan_dearer_where_they_are_compared():
    def core_hours(**given: object) -> dict[str, float]:
        return {name: row["core_hours"] for name, row in plan(**given).offline.items()}

    base, queries, codes = core_hours(), core_hours(queries=10**8), core_hours(codes=8192)
    assert {name for name in base if queries[name] > base[name]} == {"collect (BM25)", "mine"}
    assert {name for name in base if codes[name] > base[name]} == {"quantize"}
    # Ten times the queries take nearly ten times as long: 10^7 is a tenth of the pairs.
    assert 8 < queries["mine"] / base["mine"] < 11
    notes = " ".join(output.notes(plan(queries=10**6, codes=8192)))
    assert "reads all embeddings 16 times" in notes
    assert "8,192 codes need about 1,638,400" in notes


def test_the_measured_run_of_ten_million_documents_is_what_smaller_ones_predict():
    rows = measured("stages")
    stages = {one["stage"] for one in rows}
    assert set(VECTOR_STAGES) <= stages
    for stage in stages:
        *smaller, largest = sorted(
            (one for one in rows if one["stage"] == stage), key=lambda one: one["documents"]
        )
        assert largest["documents"] == 10_000_000
        found = predict(smaller, documents=largest["documents"])
        # Short stages are mostly their start; the others are within a third.
        assert found["seconds"] == pytest.approx(largest["seconds"], rel=0.7), stage
        assert found["requests"] == pytest.approx(largest["requests"], rel=0.5), stage
        # Samples reach their limit between the sizes, so a driver may be smaller than predicted, not larger.
        assert largest["driver GB"] <= 1.1 * found["driver GB"], stage


def test_twice_the_cores_take_half_of_what_grows_and_longer_texts_take_longer():
    def hours(**given: object) -> dict[str, float]:
        found = plan(**{"tokens": 18.0, "dims": (32,), "nodes": 4} | given).offline
        return {name: cost["hours"] for name, cost in found.items()}

    base, wide, long = hours(), hours(nodes=8), hours(tokens=36.0)
    for name in base:
        assert base[name] / 2 <= wide[name] < base[name]
        assert (long[name] > base[name]) == (name not in VECTOR_STAGES)
