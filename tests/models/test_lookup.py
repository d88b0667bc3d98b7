"""A lookup tower equals a slow reference: sums over tokens in float64, query by query."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray
from tokenizers import Tokenizer

import families
import tiny
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.encode.lookup import LookupEncoder
from scalingnote.models import backbone, dual_encoder, lookup
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup import LookupStart, LookupTower
from scalingnote.models.lookup_table import (
    LookupFeatures,
    Table,
    dequantize_rows,
    frequent_features,
    quantize_rows,
    start_weights,
)
from scalingnote.models.prompt import TokenRow
from scalingnote.models.tower import Tower

TEXTS = [row["content"] for row in tiny.document_rows()]
QUERIES = [*TEXTS[:6], "", "ba", "ko ba"]
DIM = 8


def build(seed: int = 0, **settings: object) -> LookupTower:
    """Build a tower in which every option has an effect."""
    config = LookupConfig(max_length=16, **settings)
    tower = dual_encoder.build_query_tower(config, dim=DIM, tokenizer_json=families.LEARNT, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, value in tower.named_parameters():
            if (name != "table" and not name.startswith("attention.")) or name.endswith("out.weight"):
                value.normal_(0, 0.3, generator=generator)
    return tower.eval()


def encode(tower: LookupTower | Tower, queries: list[str], *, packed: bool = False) -> torch.Tensor:
    rows = tower.prompt.rows(queries)
    with torch.no_grad():
        return tower(collate(rows, pad=tower.pad, packed=packed))[:, 0]


def reference(tower: LookupTower, ids: list[int]) -> np.ndarray:
    """Encode one query, token by token."""
    table = tower.table.detach().double().numpy()
    if not ids:
        return table.mean(0)
    weights = (
        np.ones(tower.tokens) if tower.log_weights is None else tower.log_weights.detach().double().exp()
    )
    total, shares = np.zeros(table.shape[1]), 0.0
    for token in ids:
        total += float(weights[token]) * table[token]
        shares += float(weights[token])
    return total / shares


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weighting", ["mean", "learned"])
def test_an_embedding_is_the_weighted_mean_of_rows(packed, weighting):
    tower = build(weighting=weighting)
    expected = np.stack([reference(tower, row.ids) for row in tower.prompt.rows(QUERIES)])
    np.testing.assert_allclose(encode(tower, QUERIES, packed=packed), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("knobs", [{"weighting": "learned"}, {"attention": True}])
def test_every_option_starts_as_the_plain_mean(knobs: dict[str, object]):
    plain = lookup.build(LookupConfig(max_length=16), dim=DIM, tokenizer_json=families.LEARNT, seed=3)
    config = LookupConfig(max_length=16, **knobs)
    other = lookup.build(config, dim=DIM, tokenizer_json=families.LEARNT, seed=3)
    embeddings = [encode(tower, [q for q in QUERIES if q]) for tower in (plain, other)]
    torch.testing.assert_close(*embeddings, atol=1e-6, rtol=1e-5)


def test_attention_depends_on_neighbours_and_not_on_padding():
    tower = build(attention=True)
    together = encode(tower, QUERIES)
    for number, query in enumerate(QUERIES):
        torch.testing.assert_close(encode(tower, [query])[0], together[number], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(encode(tower, QUERIES, packed=True), together, atol=1e-5, rtol=1e-5)
    first, second = tower.prompt.rows(["ba ko"])[0].ids[:2]
    pair = collate([TokenRow([first, second], [0])], pad=0)
    sums = [tower(collate([TokenRow([token], [0])], pad=0)) for token in (first, second)]
    assert not torch.allclose(tower(pair), (sums[0] + sums[1]) / 2, atol=1e-3)


def test_attention_follows_its_formula():
    tower = build(attention=True)
    ids = tower.prompt.rows(TEXTS[:1])[0].ids
    rows = tower.table.detach().double().numpy()[ids]
    score, out = tower.attention.matrices().astype(float)
    scores = np.exp(rows @ score @ rows.T / DIM**0.5)
    expected = (rows + scores / scores.sum(1, keepdims=True) @ rows @ out).mean(0)
    np.testing.assert_allclose(encode(tower, TEXTS[:1])[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize("attention", [False, True])
def test_a_saved_tower_encodes_the_same(tmp_path: Path, attention: bool, storage: str):
    tower = build(weighting="learned", attention=attention, storage=storage)
    tower.save(tmp_path / "query")
    table = Table.read(tmp_path / "query")
    assert (str(table.values.dtype), table.tokens) == (storage, tower.tokens)
    assert (table.scales is not None) == (storage == "int8")
    np.testing.assert_allclose(table.rows(), tower.table.detach(), atol=0 if storage == "float32" else 0.02)
    again = dual_encoder.load_query_tower(tmp_path / "query")
    assert isinstance(again, LookupTower)
    assert again.prompt.rows(QUERIES) == tower.prompt.rows(QUERIES)
    cosine = torch.nn.functional.cosine_similarity(encode(again, QUERIES), encode(tower, QUERIES))
    assert cosine.min() > {"float32": 1 - 1e-6, "float16": 0.99999, "int8": 0.998}[storage]
    again.save(tmp_path / "twice")
    for file in {path.name for path in (tmp_path / "query").iterdir()} - {"token_weights.npy", "scales.npy"}:
        assert (tmp_path / "query" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


@given(st.integers(0, 1000), st.floats(1e-6, 1e4))
def test_the_error_of_int8_is_at_most_half_a_scale(seed: int, size: float):
    rows = np.random.default_rng(seed).normal(0, size, (5, 16)).astype(np.float32)
    rows[3] = 0
    values, scales = quantize_rows(rows, "int8")
    assert values.dtype == np.int8
    error = np.abs(dequantize_rows(values, scales) - rows)
    assert (error <= 0.5001 * scales[:, None] + 1e-30).all()
    np.testing.assert_allclose(scales * 127, np.abs(rows).max(1), rtol=1e-5)


def test_rows_too_large_for_float16_are_refused():
    rows = np.array([[7e4, 1.0]], np.float32)
    with pytest.raises(ConfigError, match=r"rows of the lookup table reach 7e.04, float16 holds 65504: set"):
        quantize_rows(rows, "float16")
    assert quantize_rows(rows, "float32")[0].max() == rows.max()
    assert quantize_rows(-rows / 2, "float16")[0].min() == -35_008


def test_tables_and_tokenizers_must_match(tmp_path: Path):
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        lookup.build(LookupConfig(), dim=DIM, tokenizer_json=None, seed=0)
    with pytest.raises(ConfigError, match="pass the tokenizer that the table was made for"):
        LookupTower(torch.zeros(3, 4), Tokenizer.from_str(families.LEARNT), max_length=8)
    with pytest.raises(ArtifactError, match="is not a tower"):
        dual_encoder.load_query_tower(tmp_path)
    build().save(tmp_path / "query")
    (tmp_path / "query" / "tokenizer.json").write_text(backbone.train_tokenizer(TEXTS[:3], vocabulary=300))
    with pytest.raises(ArtifactError, match="made for another tokenizer"):
        dual_encoder.load_query_tower(tmp_path / "query")


def test_a_table_of_another_version_is_refused(tmp_path: Path):
    tower = build()
    tower.save(tmp_path)
    facts = json.loads((tmp_path / "tower.json").read_text())
    (tmp_path / "tower.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "attention"}))
    with pytest.raises(ArtifactError, match=r"lacks 'attention': another version wrote it"):
        dual_encoder.load_query_tower(tmp_path)
    (tmp_path / "tower.json").write_text(json.dumps(facts))
    np.save(tmp_path / "table.npy", np.zeros((tower.tokens + 1, DIM), np.float16))
    with pytest.raises(ArtifactError, match=r"rows for .* tokens and features: another version wrote it"):
        dual_encoder.load_query_tower(tmp_path)


# --- rows of pairs and end tokens ---------------------------------------------------------------------------


def test_frequent_pairs_and_ends_become_features():
    texts = [[1, 2, 3], [1, 2, 4], [5], [1, 2]]
    pairs = LookupFeatures(frequent_features(texts, tokens=10, bigrams=5, ends=False), tokens=10)
    assert len(pairs) == 1  # only (1, 2) occurs twice
    assert pairs.extend([1, 2, 1, 2]) == [1, 2, 1, 2, 10, 10]
    assert pairs.extend([2, 1]) == [2, 1]
    both = LookupFeatures(frequent_features(texts, tokens=10, bigrams=5, ends=True), tokens=10)
    # The pair; 1 as the first token and as the last but one, 2 as the second.
    assert sorted(both.extend([1, 2, 3])[3:]) == [10, 11, 12, 13][: len(both)]
    assert both.extend([]) == []
    none = frequent_features(texts, tokens=10, bigrams=0, ends=False)
    assert LookupFeatures(none, tokens=10).extend([1, 2]) == [1, 2]


def start_of(*, bigrams: int, ends: bool) -> tuple[LookupStart, ndarray]:
    """Return features and weights of the texts, and the count of each token in them."""
    tokenizer = Tokenizer.from_str(families.LEARNT)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS, add_special_tokens=False)]
    tokens = tokenizer.get_vocab_size()
    counts = np.bincount([token for row in ids for token in row], minlength=tokens)
    keys = frequent_features(ids, tokens=tokens, bigrams=bigrams, ends=ends)
    return LookupStart(keys, start_weights(counts, LookupFeatures(keys, tokens=tokens))), counts


def test_features_start_at_0_and_rare_tokens_weigh_most():
    start, counts = start_of(bigrams=50, ends=False)
    config = LookupConfig(bigrams=50, weighting="learned")
    plain = lookup.build(config, dim=DIM, tokenizer_json=families.LEARNT, seed=0)
    started = lookup.build(config, dim=DIM, tokenizer_json=families.LEARNT, seed=0, start=start)
    weights = started.log_weights.detach().exp()
    rare = int(np.where(counts > 0, counts, counts.max()).argmin())
    assert weights[int(counts.argmax())] < weights[rare] < 1
    assert not started.table[started.tokens :].any()
    torch.testing.assert_close(started.table[: started.tokens], plain.table)


@pytest.mark.parametrize("attention", [False, True])
def test_a_saved_table_with_features_equals_the_tower(tmp_path: Path, attention: bool):
    config = LookupConfig(weighting="learned", attention=attention, bigrams=50, ends=True, storage="float32")
    start, _ = start_of(bigrams=50, ends=True)
    tower = lookup.build(config, dim=DIM, tokenizer_json=families.LEARNT, seed=0, start=start).eval()
    tower.table.data[tower.tokens :].normal_(generator=torch.Generator().manual_seed(1))
    tower.save(tmp_path)
    queries = [*TEXTS[:20], "", "ba", "entirely other words"]
    expected = encode(tower, queries)
    encoder = LookupEncoder(tmp_path)
    np.testing.assert_allclose(encoder.encode(queries), expected, rtol=1e-4, atol=1e-5)
    for query, embedding in zip(queries[:3], expected, strict=False):
        np.testing.assert_allclose(encoder.encode([query])[0], embedding, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encode(LookupTower.load(tmp_path), queries), expected, rtol=1e-4, atol=1e-5)
