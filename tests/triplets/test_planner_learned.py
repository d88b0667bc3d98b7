import numpy as np
import pytest
import torch

from scalingnote.core.errors import ArtifactError, ConfigError, TrainingError
from scalingnote.models import backbone as backbones
from scalingnote.models.config import Scratch
from scalingnote.triplets.config import Learned
from scalingnote.triplets.planner.learned import TermRegressor, build_regressor, fit_regressor
from scalingnote.triplets.planner.planner import Planner

TINY = Scratch(
    architecture="bert", layers=1, hidden=32, heads=2, intermediate=64, vocabulary=320, max_positions=32
)
CONFIG = Learned(backbone=TINY, max_length=32, epochs=12, peak_lr=5e-3, seed=1)
# A noun is important after "buy" but not after "about": a model of single words cannot distinguish them.
NOUNS = ["fig", "plum", "pear", "kiwi", "lime", "date"]


def queries(count, seed):
    rng = np.random.default_rng(seed)
    texts, targets = [], []
    for _ in range(count):
        verb = str(rng.choice(["buy", "about"]))
        nouns = rng.choice(NOUNS, int(rng.integers(1, 4)), replace=False).tolist()
        texts.append([verb, *nouns])
        targets.append(np.array([0.0, *[verb == "buy"] * len(nouns)], dtype=np.float32))
    return texts, targets


@pytest.fixture(scope="module")
def trained():
    texts, targets = queries(300, seed=0)
    model = build_regressor(CONFIG, texts)
    losses = fit_regressor(model, texts, targets, config=CONFIG)
    return model, losses


def test_importance_depends_on_the_context_of_words(trained):
    model, losses = trained
    assert losses[-1] < losses[0] / 5
    texts, targets = queries(50, seed=1)
    scores, expected = model.score(texts), np.concatenate(targets)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert scores[expected == 1].min() > 0.5 > scores[expected == 0].max()
    buy, about = (Planner(model.score).importances(q) for q in ("Buy: lime!", "About: lime!"))
    assert list(buy) == ["lime", "buy"]
    assert buy["lime"] > 0.9
    assert about["lime"] < 0.1


def test_equal_seeds_have_equal_weights(trained):
    texts, targets = queries(300, seed=0)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = build_regressor(CONFIG, texts)
    assert fit_regressor(second, texts, targets, config=CONFIG) == trained[1]
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in trained[0].state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_a_batch_has_the_scores_of_single_queries(trained):
    score = trained[0].score
    batch = [["buy", "fig", "with", "plum"], [], ["fig", "fig"], ["about", "date", "buy", "pear"]]
    np.testing.assert_allclose(score(batch), np.concatenate([score([words]) for words in batch]), atol=1e-5)


def test_a_saved_planner_has_the_same_scores(trained, tmp_path):
    model = trained[0]
    texts, _ = queries(20, seed=2)
    model.save(tmp_path / "encoder")
    loaded = TermRegressor.load(tmp_path / "encoder", max_length=CONFIG.max_length)
    np.testing.assert_array_equal(loaded.score(texts), model.score(texts))
    with pytest.raises(ArtifactError, match=r"head\.safetensors"):
        TermRegressor.load(tmp_path, max_length=8)


def test_words_after_the_maximum_length_score_zero(trained, tmp_path):
    trained[0].save(tmp_path)
    short = TermRegressor.load(tmp_path, max_length=4)
    first, *_, last = short.score([["buy", "fig", "with", "plum"]]).tolist()
    assert first > 0
    assert last == 0
    # A word that is longer than the input is read up to the maximum length.
    assert short.score([["x" * 500]])[0] > 0


def test_unfit_backbones_are_refused():
    texts = [["buy", "fig"]]
    with pytest.raises(ConfigError, match="max_length=33"):
        build_regressor(CONFIG.model_copy(update={"max_length": 33}), texts)
    tokenizer = backbones.train_tokenizer(["buy fig"], vocabulary=300)
    causal = TINY.model_copy(update={"architecture": "qwen2"})
    backbone = backbones.build(causal, tokenizer_json=tokenizer, seed=0)
    with pytest.raises(ConfigError, match="bidirectional"):
        TermRegressor(backbone, max_length=8)


def test_a_loss_that_is_not_finite_stops_training():
    texts, targets = queries(8, seed=0)
    model = build_regressor(CONFIG, texts)
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match="peak_lr"):
        fit_regressor(model, texts, targets, config=CONFIG)
