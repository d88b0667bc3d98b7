import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks import scale
from scalingnote.cli import main as cli
from scalingnote.models.flops import PUBLISHED_SETTINGS
from scalingnote.plan import capacity
from scalingnote.plan.capacity import STAGE_FIGURES, plan_text, stage_figures
from scalingnote.plan.config import CONSTANTS, GPUS, GpuName, PlanConfig, constant
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.run.service_config import ServeConfig

ROOT = Path(cli.__file__).parents[2]
MODEL = "Qwen/Qwen2.5-7B-Instruct"
RUNS = json.loads((ROOT / "docs/results/scale.json").read_text(encoding="utf-8"))


def plan(**settings: object) -> dict[str, Any]:
    return capacity.plan(
        PlanConfig(**{"documents": 10**9, "tokens": 250, "model": MODEL, "qps": 1000} | settings)
    )


def entries(value: object) -> Iterator[dict]:
    """Yield all constants of the JSON file, at any depth."""
    if isinstance(value, dict):
        if "value" in value:
            yield value
        else:
            for inner in value.values():
                yield from entries(inner)


def test_every_constant_has_a_source():
    constants = [*entries(CONSTANTS)]
    measured = [one for one in constants if one["source"].startswith("measured")]
    assert len(measured) > 20
    for one in measured:
        table = json.loads((ROOT / "docs/results" / one["file"]).read_text())[one["table"]]
        if "row" in one:
            (table,) = (row for row in table if all(row[name] == v for name, v in one["row"].items()))
        assert one["value"] == table[one["key"]], one
    assert all(re.match("measured|design: |assumed: ", one["source"]) for one in constants)


def test_design_constants_equal_those_of_the_code():
    assert constant("index_versions") == ServeConfig.model_fields["versions_kept"].default
    assert constant("semantic_codes") == QuantizeConfig().levels * QuantizeConfig().codes
    assert set(GPUS) == set(get_args(GpuName))
    # Codes of 4 bits per two dimensions, a byte per dimension, an id, a share of 4,000 centroids.
    default = CONSTANTS["families"]["ivfpq_fast_scan + sq8"]
    assert default["bytes"]["value"] == pytest.approx(128 / 4 + 128 + 8 + 4000 * 128 * 4 / 1e6, abs=0.1)
    assert default["bytes_per_dimension"]["value"] == 1 / 4 + 1


def test_more_of_anything_never_costs_less():
    base = plan()
    more = {"documents": 2 * 10**9, "qps": 50_000, "recall": 0.971, "tokens": 500, "pairs": 10**9}
    for name, value in more.items():
        larger = plan(**{name: value})
        assert (larger["once"], larger["month"]) >= (base["once"], base["month"])
        assert larger["once"] > base["once"] or larger["month"] > base["month"]
    train, eight, adapted = (
        one["phases"]["train"] for one in (base, plan(gpus=8 * base["config"].gpus), plan(lora=16))
    )
    assert (eight["gpu_hours"], eight["days"]) == (train["gpu_hours"], train["days"] / 8)
    assert adapted["gpu_hours"] < train["gpu_hours"]
    assert capacity._round_up(3 * (1 + 1e-15)) == 3.0  # a rounding error adds no replica
    assert capacity._round_up(3.001) == 4.0


def test_the_recall_selects_a_measured_index_family():
    # Many queries: the fastest family. Few: the one with the least memory. Low recall: only codes.
    for recall, qps, family in (
        (0.962, 50_000, "ivfpq_fast_scan + sq8"),
        (0.962, 10, "ivf_sq8"),
        (0.7, 10, "ivfpq_fast_scan"),
        (0.97, 50_000, "ivfpq_fast_scan + flat"),
        (0.971, 1000, "ivfpq_fast_scan + flat"),
        (0.99, 1000, "flat"),
    ):
        assert plan(recall=recall, qps=qps)["family"] == family
    # An exhaustive search takes twice the time for twice the documents.
    once, twice = (plan(recall=0.99, documents=times * 10**9) for times in (1, 2))
    assert twice["index"]["scan_us"] == pytest.approx(2 * once["index"]["scan_us"])
    assert "no setting with inverted lists" in plan_text(once)


def test_notes_state_which_model_does_not_fit():
    notes = plan_text(plan(gpus=1, gpu="L4", model="Qwen/Qwen2.5-14B"))
    assert "TRAINING DOES NOT FIT" in notes
    assert "--lora 16" in notes
    assert "ENCODING DOES NOT FIT: weights in bfloat16 take 26 GiB of an L4's 22" in notes
    fits = plan_text(plan(gpus=64, gpu="H200"))
    assert "FIT" not in fits
    assert "recall was measured on a million documents at 128 dimensions" in fits


def test_a_plan_reads_the_config_in_a_folder(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_SETTINGS["Qwen/Qwen2.5-0.5B"]))
    models = ("Qwen/Qwen2.5-0.5B", str(tmp_path), str(tmp_path / "config.json"))
    assert len({plan(model=model)["once"] for model in models}) == 1
    arguments = ["plan", "--documents", "1e7", "--tokens", "250", "--qps", "10", "--model"]
    file = tmp_path / "out" / "plan.json"
    assert cli.main([*arguments, str(tmp_path), "--json", str(file)]) == 0
    capsys.readouterr()
    figures = json.loads(file.read_text())
    assert figures["once"] == pytest.approx(plan(documents=10**7, qps=10, model=str(tmp_path))["once"])
    assert figures["config"]["documents"] == 10**7
    assert cli.main([*arguments, "unknown/model"]) == 2
    error = capsys.readouterr().err
    assert "known offline: " in error
    assert "folder that holds one" in error


def test_all_invalid_options_are_named_in_one_line(capsys):
    settings = {"documents": "10.5", "tokens": "nan", "qps": "inf", "gpu": "H20", "recall": "1.1"}
    settings |= {"dim": "0", "node-memory": "8"}
    options = [text for name, value in settings.items() for text in (f"--{name}", value)]
    assert cli.main(["plan", "--model", MODEL, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("scalingnote: plan: ")
    assert error.count("\n") == 1
    assert all(f"{name.replace('-', '_')}" in error for name in settings)
    assert "'H200'" in error


def row(documents: int, seconds: float) -> dict[str, float | str]:
    return dict.fromkeys(STAGE_FIGURES, 1.0) | {"stage": "index", "documents": documents, "seconds": seconds}


def test_costs_are_the_line_through_the_two_largest_sizes():
    costs = scale.stage_costs([row(10, 99.0), row(3_000, 8.0), row(1_000, 4.0)])
    assert costs["seconds"] == pytest.approx([2, 0.002, 0, 0])
    figures = stage_figures(costs, documents=10_000)
    assert (figures["seconds"], figures["driver GB"]) == (pytest.approx(2 + 10_000 * 0.002), 1.0)
    noisy = scale.stage_costs([row(1_000, 4.0), row(10_000, 3.5)])  # noise does not give a negative slope
    assert stage_figures(noisy, documents=10**9)["seconds"] == 3.5


def product(stage: str, documents: int, count: int) -> dict[str, float | str]:
    """Return a run of 2 s, 1 ms per query, 0.1 ms per document and pass, and 1 µs per query and document."""
    per_pass = scale.PER_PASS.get(stage)
    passes = math.ceil(count / per_pass) if per_pass else 1
    seconds = 2 + 1e-3 * count + documents * (1e-4 * passes + 1e-6 * count)
    return dict.fromkeys(STAGE_FIGURES, seconds) | {
        "stage": stage,
        "documents": documents,
        scale.AXES[stage]: count,
    }


@pytest.mark.parametrize("stage", scale.AXES)
@pytest.mark.parametrize(("documents", "count"), [(40_000, 400), (10**9, 30_000), (10**9, 10**7)])
def test_costs_of_queries_and_codes_grow_with_documents(stage, documents, count):
    axes = [product(stage, size, few) for size in (1_000, 4_000) for few in (20, 100)]
    rows = [product(stage, size, 20) for size in (100, 10_000, 100_000)]
    figures = stage_figures(scale.stage_costs(rows, axes), documents=documents, units=count)
    expected = product(stage, documents, count)
    assert figures["seconds"] == pytest.approx(expected["seconds"], rel=0.01)
    assert figures["requests"] == pytest.approx(expected["requests"], rel=0.01)
    without_axes = stage_figures(scale.stage_costs(rows), documents=documents)
    assert without_axes["seconds"] < 0.5 * expected["seconds"]


def test_the_package_has_the_costs_that_were_measured():
    assert CONSTANTS["stages"] == scale.all_stage_costs(RUNS["stages"], RUNS["axes"])


@pytest.mark.parametrize("stage", scale.AXES)
def test_runs_with_few_queries_or_codes_predict_the_largest(stage):
    prediction = scale.over_run(RUNS["axes"], stage)
    assert 0.5 < prediction["plan over run"] < 2
    assert prediction["to"] >= 4 * prediction["from"]


def test_more_queries_cost_more_in_two_stages():
    base, more = plan()["offline"], plan(queries=10**8)["offline"]
    more_expensive = {name for name in base if more[name]["core_hours"] > base[name]["core_hours"]}
    assert more_expensive == {"collect (BM25)", "mine"}
    # The default is 10^7 queries, a tenth of the pairs; ten times as many take nearly ten times as long.
    assert 8 < more["mine"]["core_hours"] / base["mine"]["core_hours"] < 11


def test_smaller_runs_predict_ten_million_documents():
    rows = RUNS["stages"]
    stages = {one["stage"] for one in rows}
    assert set(scale.READS_EMBEDDINGS) <= stages
    for stage in stages:
        *smaller, largest = sorted(
            (one for one in rows if one["stage"] == stage), key=lambda one: one["documents"]
        )
        assert largest["documents"] == 10_000_000
        predicted = stage_figures(scale.stage_costs(smaller), documents=largest["documents"])
        # The start dominates short stages; the others are within a third.
        assert predicted["seconds"] == pytest.approx(largest["seconds"], rel=0.7), stage
        assert predicted["requests"] == pytest.approx(largest["requests"], rel=0.5), stage
        # Samples reach their limit between the sizes, so a driver may only be smaller than predicted.
        assert largest["driver GB"] <= 1.1 * predicted["driver GB"], stage


def test_time_falls_with_cores_and_grows_with_tokens():
    def hours(**settings: object) -> dict[str, float]:
        offline = plan(**{"tokens": 18.0, "dim": 32, "cores": 64} | settings)["offline"]
        return {name: cost["hours"] for name, cost in offline.items()}

    base, wide, long = hours(), hours(cores=128), hours(tokens=36.0)
    for name in base:
        assert base[name] / 2 <= wide[name] < base[name]
        assert (long[name] > base[name]) == (name not in scale.READS_EMBEDDINGS)
