"""Trials of the papers' claims: their configs, their labels, and the tables of their results."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import minilm, reproduce, smollm, trial
from benchmarks.trial import Outcome, Side, Trial
from scalingnote.models.config import TowerConfig

QUERIES = 300
RNG = np.random.default_rng(0)
LUCK = RNG.random(QUERIES)
OPTIONS = Namespace(seeds=3, steps=None, overrides=[])


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "path", lambda: Path("models/minilm"))
    monkeypatch.setattr(smollm, "path", lambda: Path("models/smollm"))


def every(*datasets: str) -> list[Trial]:
    return reproduce.trials(datasets, list(reproduce.METHODS), OPTIONS)


def side(quality: float) -> Side:
    """Return a side with nearly equal luck per query in all sides: a t-test needs unequal differences."""
    gains = np.clip(quality + 0.2 * (LUCK - 0.5), 0, 1)
    measures = dict.fromkeys(("nDCG@10", "R@10", "R@100"), float(gains.mean()))
    noise = RNG.normal(scale=0.01, size=len(gains))
    return Side(measures, (gains > 0.5).astype(float), 100.0, gains + noise)


def found(*given: tuple[str, str, bool, dict[str, Side]]) -> reproduce.Found:
    return reproduce.by_dataset(
        Outcome(reproduce.trial("medquad", backbone, method, 0, trained=trained, options=OPTIONS), sides)
        for backbone, method, trained, sides in given
    )


def config_of(one: Trial):
    plain = trial.unchanged(one.dataset, one.method)
    knobs = [*trial.TEACHERS[one.backbone](plain), *trial._of(one.knobs, plain)]
    return trial.unchanged(one.dataset, one.method, knobs)


@pytest.mark.usefixtures("models")
def test_a_decoder_is_pooled_at_its_end_token_in_every_trial():
    decoders = 0
    for one in every("medquad", "feedbackqa"):
        config = config_of(one)
        assert config.bm25 is not None
        if config.adopt is not None:
            continue
        for tower in (config.train.query, config.train.document):
            if isinstance(tower, TowerConfig) and tower.backbone.path == "models/smollm":
                decoders += 1
                assert tower.backbone.layers == (smollm.LAYERS if one.backbone == "smollm" else None)
                assert tower.pooling == "placeholders"
                assert tower.lora is not None
                assert config.train.dim == (smollm.HIDDEN if tower.projection == "none" else minilm.DIM)
        document = config.train.document
        if document.backbone.path == "models/smollm":
            views = document.prompt.count("[")
            assert document.prompt.count(smollm.END) == views == document.prompt.count(f"{smollm.END}[")
        if "lightretriever" in one.method:
            assert (document.backbone.bos, document.backbone.lowercase) == ("always", True)
            assert config.evaluate.hybrid.dense_weight == 0.7
    assert decoders > 40


def test_the_first_seed_of_every_method_comes_before_any_second():
    trials = every("medquad", "scifact")
    assert len(trials) == len({one.key for one in trials})
    assert [one.seed for one in trials] == sorted(one.seed for one in trials)
    assert {one.seed for one in trials if one.dataset == "scifact"} == {0}
    assert trials[0].method == trials[1].method == "methods/scalingdual"


def test_a_side_is_called_by_its_model_and_whether_it_was_trained():
    one = reproduce.trial("medquad", "smollm", "methods/scalingdual", 0, trained=False, options=OPTIONS)
    assert reproduce.label(one, "scalingdual") == "scalingdual, SmolLM2, untrained"
    assert reproduce.label(one, "scalingdual + bm25") == "scalingdual, SmolLM2, untrained + bm25"
    assert reproduce.label(one, "bm25") == "bm25"
    one = reproduce.trial("medquad", "minilm-native", "methods/native", 0, trained=False, options=OPTIONS)
    assert reproduce.label(one, "published") == "published, MiniLM"


def test_an_order_holds_is_reversed_or_is_not_significant():
    sides = found(
        ("smollm", "methods/scalingdual", True, {"scalingdual": side(0.7), "scalingdual + bm25": side(0.8)}),
        ("smollm", "methods/scalingdoc", True, {"scalingdoc": side(0.5)}),
        ("smollm", "methods/twinbert", True, {"twinbert": side(0.6)}),
    )
    rows = {(row["said to be better"], row["than"]): row["holds"] for row in reproduce.orders(sides)}
    assert rows == {("scalingdual", "scalingdoc"): "yes", ("scalingdoc", "twinbert"): "reversed"}
    assert reproduce.metrics(sides) == {
        "orders_compared": 2,
        "orders_significant": 2,
        "order_kept_share": 0.5,
    }
    equal = side(0.7)
    luckless = Side(equal.measures, equal.success, 1.0, RNG.permutation(equal.gains))
    sides = found(
        ("smollm", "methods/scalingdual", True, {"scalingdual": equal}),
        ("smollm", "methods/scalingdoc", True, {"scalingdoc": luckless}),
    )
    assert [row["holds"] for row in reproduce.orders(sides)] == ["not significant"]
    assert "order_kept_share" not in reproduce.metrics(sides)


def test_a_pair_with_all_layers_counts_in_place_of_the_same_pair_with_few():
    dense, both = "methods/lightretriever-dense", "ablations/lightretriever-light-both"
    names = {dense: "lightretriever-dense", both: "lightretriever-light-both"}
    few = [
        ("smollm", dense, True, {names[dense]: side(0.4)}),
        ("smollm", both, True, {names[both]: side(0.6)}),
    ]
    deep = ("smollm-30", dense, True, {names[dense]: side(0.7)})
    (row,) = reproduce.orders(found(*few, deep))  # one side of the pair is missing
    assert (row["said to be better"], row["holds"]) == (names[dense], "reversed")
    (row,) = reproduce.orders(found(*few, deep, ("smollm-30", both, True, {names[both]: side(0.5)})))
    assert (row["said to be better"], row["holds"]) == (f"{names[dense]}, 30 layers", "yes")
    assert row["than"] == f"{names[both]}, 30 layers"


def test_the_better_side_of_a_deep_pair_has_no_more_steps():
    dense, *rivals = reproduce.NEEDS_DEPTH
    for dataset in reproduce.SEEDS:
        first, *others = (
            reproduce.trial(dataset, "smollm-30", method, 0, trained=True, options=OPTIONS).steps
            for method in (dense, *rivals)
        )
        assert first in (100, 200)
        assert all(steps >= first for steps in others)


def test_what_the_decoders_learned_is_repeated(tmp_path: Path):
    file = tmp_path / "decoders.json"
    with pytest.raises(SystemExit, match=r"run python -m benchmarks\.decoders"):
        reproduce.learned(file)
    file.write_text(json.dumps({"metrics": {"decoder_r10": 0.9, "twinbert_r10": 1.0}}))
    assert reproduce.learned(file) == {"decoder_r10": 0.9}


def test_what_training_adds_is_over_the_same_models_before():
    sides = found(
        ("smollm", "methods/scalingdual", False, {"scalingdual": side(0.2)}),
        ("smollm", "methods/scalingdual", True, {"scalingdual": side(0.6), "scalingdual + bm25": side(0.9)}),
    )
    assert [row["gain"] for row in reproduce.untrained(sides)] == ["+0.400"]
    assert reproduce.metrics(sides)["untrained_gap"] == 0.4
