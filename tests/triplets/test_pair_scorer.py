import sys

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    BertModel,
)

import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.triplets.collect.transformer_models import PairScorer
from scalingnote.triplets.config import CrossEncoderConfig

QUERIES = ["what is asthma", "高血压怎么办", "what is asthma", "", "asthma " * 50, "what is asthma"]
DOCUMENTS = [
    "a disease of the lungs",
    "少吃盐\n\n高血压",
    "盐",
    "lungs " * 80,
    "lungs",
    "a disease of the lungs",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("cross_encoder"), BertForSequenceClassification, num_labels=1)


def save(folder, architecture, **knobs) -> str:
    return tiny.pair_classifier(folder, [*QUERIES, *DOCUMENTS] * 2, architecture, **knobs)


def one_at_a_time(path: str, max_length: int) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    logits = []
    for query, document in zip(QUERIES, DOCUMENTS, strict=True):
        inputs = tokenizer(query, document, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.inference_mode():
            logits.append(model(**inputs).logits.item())
    return np.array(logits)


@pytest.mark.parametrize(("batch_size", "max_length"), [(1, 48), (4, 48), (64, 20)])
def test_scores_equal_plain_transformers_one_pair_at_a_time(checkpoint, batch_size, max_length):
    expected = one_at_a_time(checkpoint, max_length)
    assert len(set(expected.round(3))) == 5
    for activation, values in (("none", expected), ("sigmoid", 1 / (1 + np.exp(-expected)))):
        config = CrossEncoderConfig(
            path=checkpoint, batch_size=batch_size, max_length=max_length, activation=activation
        )
        scores = PairScorer(config, device="cpu").score(QUERIES, DOCUMENTS)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, values, atol=1e-5)


def test_scores_do_not_depend_on_the_order_of_pairs(checkpoint):
    model = PairScorer(CrossEncoderConfig(path=checkpoint, batch_size=2, max_length=48), device="cpu")
    scores = model.score(QUERIES, DOCUMENTS)
    assert scores[0] == scores[5]  # the same pair
    assert (model.score(QUERIES[::-1], DOCUMENTS[::-1]) == scores[::-1]).all()
    assert model.score([], []).shape == (0,)


def test_a_text_may_be_longer_than_the_model_reads(checkpoint):
    model = PairScorer(CrossEncoderConfig(path=checkpoint, max_length=512), device="cpu")
    assert np.isfinite(model.score(["asthma " * 100], ["lungs " * 100])).all()


def test_other_models_than_cross_encoders_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {
        "no/such-model": "cannot load a cross-encoder from 'no/such-model'",
        "/no/such/folder": "cannot load a cross-encoder from '/no/such/folder'",
        str(tmp_path / "empty"): "cannot load a cross-encoder",
        save(tmp_path / "encoder", BertModel): "is BertModel, which has no trained score",
        save(tmp_path / "three", BertForSequenceClassification, num_labels=3): "has 3 labels",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            PairScorer(CrossEncoderConfig(path=path), device="cpu")


def test_the_error_names_a_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match="pip install sentence-transformers"):
        PairScorer(CrossEncoderConfig(path="any"))
