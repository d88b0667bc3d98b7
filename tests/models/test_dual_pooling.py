"""The dual-pooled cross-encoder: both poolings equal slow references, also after it is saved."""

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
TOKENIZER_JSON = backbone.train_tokenizer([" ".join(row.values()) for row in TEXTS], vocabulary=400)
SETTINGS = {"query_length": 12, "document_length": 24, "template": "{title} {content}"}


def model(pooling: str = "segments", *, dim: int | None = None, reconstruct: bool = True) -> CrossEncoder:
    base = backbone.build(tiny.BIDIRECTIONAL, tokenizer_json=TOKENIZER_JSON, seed=0)
    return CrossEncoder(base, pooling=pooling, dim=dim, reconstruct=reconstruct, **SETTINGS).eval()


def rows(model: CrossEncoder) -> list[TokenRow]:
    """Make pairs of unequal length; the fourth has no query, the fifth no document."""
    queries = model.query_prompt.rows([row["title"] for row in TEXTS[:3]] + ["", "ba ko", "li"])
    columns = ([row[name] for row in TEXTS] for name in ("title", "topic", "content"))
    documents = model.document_prompt.rows(*columns)
    (empty,) = model.document_prompt.rows([""], [""], [""])
    documents[4] = empty
    return [pair(query, document) for query, document in zip(queries, documents, strict=True)]


def states(model: CrossEncoder, row: TokenRow) -> torch.Tensor:
    """Compute the last states of one row."""
    ids = torch.tensor([row.ids])
    types = (torch.arange(len(row.ids)) > row.positions[1]).long()[None]
    return model.backbone(input_ids=ids, token_type_ids=types).last_hidden_state[0]


def slow(model: CrossEncoder, row: TokenRow) -> tuple[list[torch.Tensor], float]:
    """Compute proxies and reconstruction loss of one row."""
    states_of_row, middle, end = states(model, row), row.positions[1], len(row.ids) - 1
    spans = [range(1, middle), range(middle + 1, end)]
    if model.pooling == "special":
        pooled = [states_of_row[0], states_of_row[middle]]
    else:
        zero = torch.zeros(states_of_row.shape[1])
        pooled = [sum((states_of_row[i] / math.sqrt(len(span)) for i in span), zero) for span in spans]
    words = [i for span in spans for i in span]
    shares = [F.log_softmax(model.decoder.weight @ states_of_row[i], dim=0)[row.ids[i]].item() for i in words]
    return pooled, -sum(shares) / len(words)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pooling", ["special", "segments"])
@torch.no_grad()
def test_a_batch_gives_the_proxies_of_single_pairs(pooling: str, packed: bool):
    encoder = model(pooling)
    pairs = rows(encoder)
    actual = encoder(collate(pairs, pad=encoder.pad, packed=packed))[:, 0]
    assert actual.shape == (6, 2 * 32 + 1)
    for row, values in zip(pairs, actual, strict=True):
        (query, document), loss = slow(encoder, row)
        torch.testing.assert_close(values[:32], query, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values[32:64], document, rtol=1e-4, atol=1e-5)
        assert values[64].item() == pytest.approx(loss, rel=1e-4)


def test_a_pair_is_the_query_and_the_documents_words():
    encoder = model()
    query, document = TokenRow([5, 10, 11, 6], [0]), TokenRow([5, 20, 21, 99, 6], [3])
    assert pair(query, document) == TokenRow([5, 10, 11, 6, 20, 21, 6], [0, 3])
    first, end = encoder.query_prompt.rows([""])[0].ids
    for row in rows(encoder):
        assert (row.ids[0], row.ids[row.positions[1]], row.ids[-1]) == (first, end, end)
        assert encoder.tokenizer.convert_tokens_to_ids("[EMB]") not in row.ids


@torch.no_grad()
def test_a_score_is_the_product_of_two_proxies():
    cross_encoder = model()
    encoder = PairEncoder(cross_encoder, token_budget=64)
    pairs = rows(cross_encoder)
    document_rows = cross_encoder.document_prompt.rows(
        *([row[n] for row in TEXTS] for n in ("title", "topic", "content"))
    )
    actual = encoder.documents(document_rows)
    (_, expected), _ = slow(cross_encoder, pairs[3])  # the pair without a query
    np.testing.assert_allclose(actual[3], expected.numpy(), rtol=1e-4, atol=1e-5)
    queries = cross_encoder.query_prompt.rows([row["title"] for row in TEXTS])
    (query, document), _ = slow(cross_encoder, pair(queries[1], document_rows[2]))
    expected_score = (query @ document).item() / math.sqrt(32)
    assert encoder.scores(queries[1:2], document_rows[2:3])[0] == pytest.approx(expected_score, rel=1e-4)
    assert scores(query[None], document[None]).item() == pytest.approx(expected_score, rel=1e-5)
    without_document, with_document = (
        encoder.queries(queries[1:2], [document]) for document in (None, document_rows[2])
    )
    np.testing.assert_allclose(with_document[0], query.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(without_document - with_document).max() > 1e-3


@pytest.mark.parametrize("dim", [None, 8])
@torch.no_grad()
def test_a_saved_cross_encoder_gives_the_same_proxies(tmp_path: Path, dim: int | None):
    encoder = model("special", dim=dim)
    encoder.save(tmp_path / "model")
    again = CrossEncoder.load(tmp_path / "model")
    batch = collate(rows(encoder), pad=encoder.pad)
    for proxy, other in zip(encoder.proxies(batch), again.proxies(batch), strict=True):
        torch.testing.assert_close(proxy, other)
        assert proxy.shape == (6, dim or 32)
    assert rows(again) == rows(encoder)


def test_unsuitable_backbones_and_folders_are_refused(tmp_path: Path):
    causal = backbone.build(tiny.CAUSAL, tokenizer_json=TOKENIZER_JSON, seed=0)
    with pytest.raises(ConfigError, match="bidirectional"):
        CrossEncoder(causal, pooling="special", dim=None, **SETTINGS)
    bidirectional = backbone.build(tiny.BIDIRECTIONAL, tokenizer_json=TOKENIZER_JSON, seed=0)
    with pytest.raises(ConfigError, match=r"make 70 tokens.*reads 64"):
        CrossEncoder(bidirectional, pooling="special", dim=None, **SETTINGS | {"document_length": 60})
    with pytest.raises(ArtifactError, match="not a cross-encoder"):
        CrossEncoder.load(tmp_path)
