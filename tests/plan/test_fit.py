import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.core.errors import DataError
from scalingnote.plan import laws
from scalingnote.plan.laws import Fit, Kind, Runs, joint_law, power_law

# As published: Qwen2.5 on Xiaohongshu's Small set, entropy among sampled negatives of its validation set.
PUBLISHED_SIZE = {"c": 3.82e5, "alpha": 0.14, "delta": 0.18}
PUBLISHED_DATA = {"c": 2.60e3, "alpha": 0.14, "delta": 1.4e-7}
PUBLISHED_JOINT = {"a": 3.15e5, "b": 1.16e2, "alpha": 0.12 * 0.770, "beta": 0.770, "delta": 0.108}
# Both terms of Eq. 20 are equal somewhere in the grid below, so that runs determine all constants.
JOINT = {"a": 3e5, "b": 2e3, "alpha": 0.12 * 0.77, "beta": 0.77, "delta": 0.108}
PLANTED: dict[Kind, dict[str, float]] = {"size": PUBLISHED_SIZE, "data": PUBLISHED_DATA, "joint": JOINT}


def planted(kind: Kind) -> Fit:
    """Return the planted law as a fit, with two equal draws."""
    values = {name: np.full(3, value) for name, value in PLANTED[kind].items()}
    return Fit(kind, values, Runs(*np.ones((3, 1))), r2=1.0, scatter=0.0)


def runs(kind: Kind, *, noise: float = 0.01, seed: int = 0) -> Runs:
    if kind == "size":
        parameters, data = np.repeat(np.geomspace(1e6, 1e10, 8), 3), np.full(24, 1e6)
    elif kind == "data":
        parameters, data = np.full(24, 1e9), np.repeat(np.geomspace(1e4, 1e8, 8), 3)
    else:
        grid = np.meshgrid(np.geomspace(1e6, 1e10, 6), np.geomspace(1e3, 1e7, 5))
        parameters, data = (axis.ravel() for axis in grid)
    entropy = planted(kind).entropies(parameters[:, None], data[:, None])[:, 0]
    scatter = np.exp(noise * np.random.default_rng(seed).standard_normal(len(entropy)))
    return Runs(parameters, data, entropy * scatter)


def test_the_published_equations_have_the_published_values():
    size, data = (lambda n: power_law(n, **PUBLISHED_SIZE)), (lambda n: power_law(n, **PUBLISHED_DATA))
    # ln(3.82e5 / 6.53e9) = -9.74650; times 0.14: -1.36451; exp: 0.25551; plus 0.18
    assert size(6.53e9) == pytest.approx(0.43551, abs=1e-5)
    # Qwen2.5-0.5B, 3.58e8 parameters without embeddings: ln = -6.84285, times 0.14: -0.95800, exp: 0.38366
    assert size(3.58e8) == pytest.approx(0.56366, abs=1e-5)
    # Small's nine tenths, 809,724 pairs: ln(2.60e3 / 809724) = -5.74120; times 0.14: -0.80377; exp: 0.44764
    assert data(809_724.0) == pytest.approx(0.44764, abs=1e-5)
    # 10^8 pairs: ln = -10.55739, times 0.14: -1.47804; exp: 0.22808
    assert data(1e8) == pytest.approx(0.22808, abs=1e-5)
    # ln(3.15e5 / 6.53e9) = -9.93934; times 0.12: -1.19272; exp: 0.30339; plus
    # 116 / 809724 = 0.00014: 0.30354; ln: -1.19225; times 0.77: -0.91803; exp: 0.39930; plus 0.108
    assert joint_law(6.53e9, 809_724.0, **PUBLISHED_JOINT) == pytest.approx(0.50730, abs=1e-5)
    # The two laws of one size meet where both were run: 7B on Small.
    assert abs(size(6.53e9) - data(809_724.0)) < 0.02


@pytest.mark.parametrize("kind", PLANTED)
def test_a_fit_finds_planted_constants(kind: Kind):
    exact = laws.fit(kind, runs(kind, noise=0.0), draws=1).constants()
    noisy = laws.fit(kind, runs(kind, seed=4), draws=50)
    assert noisy.r2 > 0.99
    assert 0.005 < noisy.scatter < 0.02
    for name, interval in noisy.constants().items():
        truth = PLANTED[kind][name]
        assert exact[name].value == pytest.approx(truth, rel=0.02, abs=1e-3)
        # A floor is never negative, so a value planted at the edge has draws only on one side.
        assert interval.low <= max(truth, 1e-6) <= interval.high, name
    beyond = noisy.predict(parameters=1e11, data=1e10)
    assert beyond.low < planted(kind).predict(parameters=1e11, data=1e10).value < beyond.high
    assert beyond.low < beyond.value < beyond.high


@pytest.mark.parametrize(
    ("kind", "law", "sizes"),
    [
        ("size", {"c": 1.43e4, "alpha": 0.483, "delta": 1.904}, (2656, 10_432, 23_328, 82_624, 185_376)),
        ("data", {"c": 1.06e5, "alpha": 0.294, "delta": 0.0}, (896, 1792, 3584, 7168)),
    ],
)
def test_intervals_of_few_runs_are_wide_enough(kind: Kind, law: dict[str, float], sizes: tuple[int, ...]):
    # Sizes and laws of the committed ladder. Without Student's t, 68 and 72 of 100 intervals hold the truth.
    along, same = np.array(sizes, dtype=float), np.full(len(sizes), 1e4)
    parameters, data = (along, same) if kind == "size" else (same, along)
    hits = []
    for seed in range(12):
        scatter = np.exp(0.003 * np.random.default_rng(seed).standard_normal(len(along)))
        fit = laws.fit(kind, Runs(parameters, data, power_law(along, **law) * scatter), draws=20)
        assert fit.freedom == len(sizes) - 3
        intervals = [(fit.constants()["alpha"], law["alpha"])]
        for times in (1, 10):
            size = float(times * along[-1])
            intervals.append((fit.predict(parameters=size, data=size), power_law(size, **law)))
        hits += [interval.low <= truth <= interval.high for interval, truth in intervals]
    assert np.mean(hits) > 0.85


def test_random_entropies_reach_a_high_r2():
    # Random entropies that decrease: docs/guides/scaling.md states the R² that they reach.
    amounts, same = np.array([896.0, 1792, 3584, 7168]), np.full(4, 1e4)
    falling = [np.sort(np.random.default_rng(seed).uniform(2, 5.5, 4))[::-1] for seed in range(20)]
    r2_values = [laws.fit("data", Runs(same, amounts, entropy), draws=1).r2 for entropy in falling]
    assert np.median(r2_values) == pytest.approx(0.91, abs=0.03)
    assert np.quantile(r2_values, 0.75) == pytest.approx(0.985, abs=0.01)


def test_one_failed_run_bends_neither_curve_nor_interval(monkeypatch: pytest.MonkeyPatch):
    clean = runs("size")
    entropy = clean.entropy.copy()
    entropy[-2] *= 3
    failed = Runs(clean.parameters, clean.data, entropy)
    inside = laws.fit("size", failed, draws=100).predict(parameters=1e8, data=1e6)
    assert inside.low < inside.value < inside.high
    assert inside.high - inside.low < 0.03 * inside.value

    def beyond(fitted_runs: Runs) -> float:
        return laws.fit("size", fitted_runs, draws=1).predict(parameters=1e11, data=1e6).value

    before, after = beyond(clean), beyond(failed)
    monkeypatch.setattr(laws, "HUBER_THRESHOLD", 1e3)  # squared loss
    assert abs(after / before - 1) < 0.03
    assert abs(beyond(failed) / before - 1) > 3 * abs(after / before - 1)


def test_the_split_is_the_best_of_a_grid():
    budget, per_parameter = 1e21, 4_000.0
    best = {
        name: interval.value
        for name, interval in planted("joint").split(budget, per_parameter=4_000.0).items()
    }
    assert best["parameters"] * best["data"] * per_parameter == pytest.approx(budget)
    parameters = np.geomspace(1e4, 1e14, 100_001)
    entropies = joint_law(parameters, budget / per_parameter / parameters, **JOINT)
    assert best["parameters"] == pytest.approx(parameters[entropies.argmin()], rel=1e-3)
    assert best["entropy"] == pytest.approx(entropies.min())
    fitted = laws.fit("joint", runs("joint"), draws=20).split(budget, per_parameter=per_parameter)[
        "parameters"
    ]
    assert fitted.low < best["parameters"] < fitted.high
    with pytest.raises(DataError, match="fit the joint law"):
        planted("size").split(budget, per_parameter=per_parameter)


def test_runs_are_read_from_a_table_without_bad_rows():
    table = pa.table({"parameters": [10, 20], "examples": [5, 5], "contrastive_entropy": [2.0, 1.0]})
    assert laws.read_runs(table).data.tolist() == [5, 5]
    with pytest.raises(DataError, match="lack \\['examples'\\]"):
        laws.read_runs(table.drop_columns("examples"))
    worse = table.set_column(2, "contrastive_entropy", pa.array([2.0, math.nan]))
    with pytest.raises(DataError, match="run 1 has contrastive_entropy=nan"):
        laws.read_runs(worse)


def test_too_few_sizes_are_refused():
    few = Runs(np.array([1.0, 2, 3]), np.ones(3), np.array([3.0, 2, 1]))
    with pytest.raises(DataError, match=r"at least 4 model sizes, .* found 3 runs of 3 model sizes and 1"):
        laws.fit("size", few)
    for kind, planted_kind, needs in (
        ("size", "joint", "all with the same number of pairs"),
        ("data", "joint", "all with the same model size"),
        ("joint", "size", "at least 3 model sizes"),
    ):
        with pytest.raises(DataError, match=needs):
            laws.fit(kind, runs(planted_kind))


@pytest.mark.parametrize("kind", ["data", "joint"])
def test_a_plot_has_a_curve_and_a_band_for_each_data_size(kind: Kind, tmp_path: Path):
    laws.draw(laws.fit(kind, runs(kind), draws=5), tmp_path / "law.svg")
    text = (tmp_path / "law.svg").read_text()
    assert text.count("FillBetweenPolyCollection") == (5 if kind == "joint" else 1)
