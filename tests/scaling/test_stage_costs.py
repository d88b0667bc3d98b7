"""Costs of offline stages: lines through what benchmarks/scale.py measured."""

import json
from pathlib import Path

import pytest

from scalingnote.scaling.stage_costs import FIGURES, VECTOR_STAGES, measured_rows, predict, stage_costs

SCALE = json.loads((Path(__file__).parents[2] / "docs/results/scale.json").read_text(encoding="utf-8"))
PRICES = {"core_price": 0.06, "request_price": 5.0}


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


def test_the_package_computes_with_what_the_benchmark_wrote():
    assert measured_rows() == SCALE["stages"]


def test_the_measured_run_of_ten_million_documents_is_what_smaller_ones_predict():
    rows = measured_rows()
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
    def hours(**given: float) -> dict[str, float]:
        settings = {"documents": 10**9, "tokens": 18.0, "dim": 32, "cores": 64} | PRICES | given
        return {one.name: one.hours for one in stage_costs(**settings)}

    base, wide, long = hours(), hours(cores=128), hours(tokens=36.0)
    for name in base:
        assert base[name] / 2 <= wide[name] < base[name]
        assert (long[name] > base[name]) == (name not in VECTOR_STAGES)
