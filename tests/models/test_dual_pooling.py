"""The dual-pooled cross-encoder: both poolings against slow twins, and what a saved one gives back."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tiny
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.models import backbone
from scalingnote.models.batch import collate
from scalingnote.models.cross_encoder import CrossEncoder, pair, scores
from scalingnote.models.prompt import TokenRow
from scalingnote.train.cross_encoder.pairs import PairEncoder

TEXTS = tiny.document_rows(6)
LEARNT = backbone.train_tokenizer([" ".join(row.values()) for row in TEXTS], vocabulary=400)
KNOBS = {"query_length": 12, "document_length": 24, "template": "{title} {content}"}


def model(pooling: str = "segments", *, dim: int | None = None, reconstruct: bool = True) -> CrossEncoder:
    made = backbone.build(tiny.BIDIRECTIONAL, tokenizer_json=LEARNT, seed=0)
    return CrossEncoder(made, pooling=pooling, dim=dim, reconstruct=reconstruct, **KNOBS).eval()


def rows(made: CrossEncoder) -> list[TokenRow]:
    """Pairs of unequal length; the fourth has no query, the fifth no document."""
    queries = made.query_prompt.rows([row["title"] for row in TEXTS[:3]] + ["", "ba ko", "li"])
    columns = ([row[name] for row in TEXTS] for name in ("title", "topic", "content"))
    documents = made.document_prompt.rows(*columns)
    (empty,) = made.document_prompt.rows([""], [""], [""])
    documents[4] = empty
    return [pair(query, document) for query, document in zip(queries, documents, strict=True)]


def states(made: CrossEncoder, row: TokenRow) -> torch.Tensor:
    """The last states of one row alone."""
    ids = torch.tensor([row.ids])
    types = (torch.arange(len(row.ids)) > row.positions[1]).long()[None]
    return made.backbone(input_ids=ids, token_type_ids=types).last_hidden_state[0]


def slow(made: CrossEncoder, row: TokenRow) -> tuple[list[torch.Tensor], float]:
    """Proxies and reconstruction loss of one row alone."""
    found, cut, end = states(made, row), row.positions[1], len(row.ids) - 1
    spans = [range(1, cut), range(cut + 1, end)]
    if made.pooling == "special":
        pooled = [found[0], found[cut]]
    else:
        zero = torch.zeros(found.shape[1])
        pooled = [sum((found[i] / math.sqrt(len(span)) for i in span), zero) for span in spans]
    words = [i for span in spans for i in span]
    shares = [F.log_softmax(made.decoder.weight @ found[i], dim=0)[row.ids[i]].item() for i in words]
    return pooled, -sum(shares) / len(words)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pooling", ["special", "segments"])
@torch.no_grad()
def test_proxies_are_those_of_each_pair_alone(pooling: str, packed: bool):
    made = model(pooling)
    given = rows(made)
    found = made(collate(given, pad=made.pad, packed=packed))[:, 0]
    assert found.shape == (6, 2 * 32 + 1)
    for row, values in zip(given, found, strict=True):
        (query, document), loss = slow(made, row)
        torch.testing.assert_close(values[:32], query, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values[32:64], document, rtol=1e-4, atol=1e-5)
        assert values[64].item() == pytest.approx(loss, rel=1e-4)


def test_a_pair_is_the_query_and_the_documents_words():
    made = model()
    query, document = TokenRow([5, 10, 11, 6], [0]), TokenRow([5, 20, 21, 99, 6], [3])
    assert pair(query, document) == TokenRow([5, 10, 11, 6, 20, 21, 6], [0, 3])
    first, end = made.query_prompt.rows([""])[0].ids
    for row in rows(made):
        assert (row.ids[0], row.ids[row.positions[1]], row.ids[-1]) == (first, end, end)
        assert made.tokenizer.convert_tokens_to_ids("[EMB]") not in row.ids


@torch.no_grad()
def test_a_document_is_embedded_whatever_is_asked_and_a_score_is_a_product_of_proxies():
    made = model()
    encoder = PairEncoder(made, token_budget=64)
    given = rows(made)
    read = made.document_prompt.rows(*([row[n] for row in TEXTS] for n in ("title", "topic", "content")))
    found = encoder.documents(read)
    (_, expected), _ = slow(made, given[3])  # the pair without a query
    np.testing.assert_allclose(found[3], expected.numpy(), rtol=1e-4, atol=1e-5)
    queries = made.query_prompt.rows([row["title"] for row in TEXTS])
    (query, document), _ = slow(made, pair(queries[1], read[2]))
    expected_score = (query @ document).item() / math.sqrt(32)
    assert encoder.scores(queries[1:2], read[2:3])[0] == pytest.approx(expected_score, rel=1e-4)
    assert scores(query[None], document[None]).item() == pytest.approx(expected_score, rel=1e-5)
    alone, beside = (encoder.queries(queries[1:2], [document]) for document in (None, read[2]))
    np.testing.assert_allclose(beside[0], query.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(alone - beside).max() > 1e-3


@pytest.mark.parametrize("dim", [None, 8])
@torch.no_grad()
def test_a_saved_one_gives_the_same_proxies(tmp_path: Path, dim: int | None):
    made = model("special", dim=dim)
    made.save(tmp_path / "model")
    again = CrossEncoder.load(tmp_path / "model")
    batch = collate(rows(made), pad=made.pad)
    for mine, other in zip(made.proxies(batch), again.proxies(batch), strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.shape == (6, dim or 32)
    assert rows(again) == rows(made)


def test_what_is_no_cross_encoder_is_refused(tmp_path: Path):
    causal = backbone.build(tiny.CAUSAL, tokenizer_json=LEARNT, seed=0)
    with pytest.raises(ConfigError, match="bidirectional"):
        CrossEncoder(causal, pooling="special", dim=None, **KNOBS)
    made = backbone.build(tiny.BIDIRECTIONAL, tokenizer_json=LEARNT, seed=0)
    with pytest.raises(ConfigError, match=r"make 70 tokens.*reads 64"):
        CrossEncoder(made, pooling="special", dim=None, **KNOBS | {"document_length": 60})
    with pytest.raises(ArtifactError, match="not a cross-encoder"):
        CrossEncoder.load(tmp_path)
