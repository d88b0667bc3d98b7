"""A lookup tower against slow twins: sums over tokens and n-grams in float64, one query after the other."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import tiny
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import backbone, lookup, ngrams, query_tower
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup import LookupTower
from scalingnote.models.prompt import Row
from scalingnote.models.table import Table, restored, stored
from scalingnote.models.tower import Tower, collate

TEXTS = [row["content"] for row in tiny.document_rows()]
LEARNT = backbone.train_tokenizer(TEXTS, vocabulary=400)
QUERIES = [*TEXTS[:6], "", "ba", "ko ba"]
DIM = 8


def mined(made: LookupTower, most: int = 20) -> np.ndarray:
    rows = (row.ids for row in made.prompt.rows(TEXTS))
    return ngrams.mine(rows, vocabulary=made.tokens, most=most)


def build(seed: int = 0, *, with_ngrams: int = 0, **knobs: object) -> LookupTower:
    """A tower whose options all do something."""
    config = LookupConfig(max_length=16, ngrams=with_ngrams, **knobs)
    plain = lookup.build(LookupConfig(max_length=16), dim=DIM, tokenizer_json=LEARNT, seed=seed)
    found = mined(plain, with_ngrams) if with_ngrams else None
    made = query_tower.build(config, dim=DIM, tokenizer_json=LEARNT, seed=seed, ngrams=found)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if (name != "table" and not name.startswith("attention.")) or name.endswith("out.weight"):
                value.normal_(0, 0.3, generator=generator)
        made.table[made.tokens :].normal_(generator=generator)
    return made.eval()


def encoded(made: LookupTower | Tower, queries: list[str], *, packed: bool = False) -> torch.Tensor:
    rows = made.prompt.rows(queries)
    with torch.no_grad():
        return made(collate(rows, pad=made.pad, packed=packed))[:, 0]


def twin(made: LookupTower, ids: list[int]) -> np.ndarray:
    """One query, token by token."""
    table = made.table.detach().double().numpy()
    if not ids:
        return table.mean(0)
    weights = np.ones(made.tokens) if made.log_weights is None else made.log_weights.detach().double().exp()
    total, shares = np.zeros(table.shape[1]), 0.0
    for token in ids:
        total += float(weights[token]) * table[token]
        shares += float(weights[token])
    places = {tuple(tokens): made.tokens + i for i, tokens in enumerate(made.ngrams.tolist())}
    for size in (2, 3):
        for start in range(len(ids) - size + 1):
            tokens = (*ids[start : start + size], -1)[:3]
            if tokens in places:
                total += table[places[tokens]]
    return total / shares


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weighting", ["mean", "learned"])
@pytest.mark.parametrize("with_ngrams", [0, 20])
def test_an_embedding_is_the_weighted_mean_of_rows_plus_its_ngrams(packed, weighting, with_ngrams):
    made = build(weighting=weighting, with_ngrams=with_ngrams)
    expected = np.stack([twin(made, row.ids) for row in made.prompt.rows(QUERIES)])
    np.testing.assert_allclose(encoded(made, QUERIES, packed=packed), expected, rtol=1e-4, atol=1e-5)


@given(st.lists(st.lists(st.integers(0, 5), max_size=9), min_size=1, max_size=6), st.integers(0, 12))
def test_ngrams_are_mined_and_found_as_by_counting_them_one_by_one(rows: list[list[int]], most: int):
    counts: dict[tuple[int, ...], int] = {}
    where: list[tuple[tuple[int, ...], int]] = []
    for number, row in enumerate(rows):
        for size in (2, 3):
            for start in range(len(row) - size + 1):
                key = (*row[start : start + size], -1)[:3]
                counts[key] = counts.get(key, 0) + 1
                where.append((key, number))
    kept = [key for key in sorted(counts, key=lambda key: (-counts[key], key)) if counts[key] > 1][:most]
    found = ngrams.mine(rows, vocabulary=6, most=most)
    assert [tuple(row) for row in found.tolist()] == kept
    keys = ngrams.keys_of(found, 6)
    order = np.argsort(keys)
    ids = np.array([token for row in rows for token in row], np.int64)
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    places, within = ngrams.find(ids, row_of, keys=keys[order], vocabulary=6)
    seen = [(kept[order[place]], row) for place, row in zip(places.tolist(), within.tolist(), strict=True)]
    assert sorted(seen) == sorted(item for item in where if item[0] in kept)
    # Cutting the rows into blocks, or turning them round, changes nothing.
    assert ngrams.mine(rows[::-1], vocabulary=6, most=most).tolist() == found.tolist()


def test_counts_are_merged_over_blocks(monkeypatch):
    rows = [row.ids for row in build().prompt.rows(TEXTS)]
    whole = ngrams.mine(rows, vocabulary=400, most=50)
    monkeypatch.setattr(ngrams, "_AT_ONCE", 7)
    np.testing.assert_array_equal(ngrams.mine(rows, vocabulary=400, most=50), whole)


@pytest.mark.parametrize("knobs", [{"weighting": "learned"}, {"attention": True}])
def test_every_option_starts_as_the_plain_mean(knobs: dict[str, object]):
    plain = lookup.build(LookupConfig(max_length=16), dim=DIM, tokenizer_json=LEARNT, seed=3)
    found = mined(plain)
    config = LookupConfig(max_length=16, ngrams=20, **knobs)
    made = lookup.build(config, dim=DIM, tokenizer_json=LEARNT, seed=3, ngrams=found)
    both = [encoded(tower, [q for q in QUERIES if q]) for tower in (plain, made)]
    torch.testing.assert_close(*both, atol=1e-6, rtol=1e-5)


def test_attention_lets_neighbours_matter_and_padding_not():
    made = build(attention=True)
    together = encoded(made, QUERIES)
    for number, query in enumerate(QUERIES):
        torch.testing.assert_close(encoded(made, [query])[0], together[number], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(encoded(made, QUERIES, packed=True), together, atol=1e-5, rtol=1e-5)
    first, second = made.prompt.rows(["ba ko"])[0].ids[:2]
    pair = collate([Row([first, second], [0])], pad=0)
    sums = [made(collate([Row([token], [0])], pad=0)) for token in (first, second)]
    assert not torch.allclose(made(pair), (sums[0] + sums[1]) / 2, atol=1e-3)


def test_attention_is_the_formula_it_names():
    made = build(attention=True)
    ids = made.prompt.rows(TEXTS[:1])[0].ids
    rows = made.table.detach().double().numpy()[ids]
    score, out = made.attention.matrices().astype(float)
    scores = np.exp(rows @ score @ rows.T / DIM**0.5)
    expected = (rows + scores / scores.sum(1, keepdims=True) @ rows @ out).mean(0)
    np.testing.assert_allclose(encoded(made, TEXTS[:1])[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", [False, True])
def test_a_saved_tower_encodes_the_same(tmp_path: Path, attention: bool):
    made = build(weighting="learned", with_ngrams=20, attention=attention)
    made.save(tmp_path / "query", storage="float32")
    again = query_tower.load(tmp_path / "query")
    assert isinstance(again, LookupTower)
    assert again.prompt.rows(QUERIES) == made.prompt.rows(QUERIES)
    torch.testing.assert_close(encoded(again, QUERIES), encoded(made, QUERIES))
    again.save(tmp_path / "twice")
    for file in (tmp_path / "query").iterdir():
        assert (
            file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()
            or file.name == "token_weights.npy"
        )


@given(st.integers(0, 1000), st.floats(1e-6, 1e4))
def test_integers_are_off_by_half_a_scale_at_most(seed: int, size: float):
    rows = np.random.default_rng(seed).normal(0, size, (5, 16)).astype(np.float32)
    rows[3] = 0
    values, scales = stored(rows, "int8")
    assert values.dtype == np.int8
    error = np.abs(restored(values, scales) - rows)
    assert (error <= 0.5001 * scales[:, None] + 1e-30).all()
    np.testing.assert_allclose(scales * 127, np.abs(rows).max(1), rtol=1e-5)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_a_folder_is_read_without_torch_and_keeps_directions(tmp_path: Path, storage: str):
    made = build(with_ngrams=20)
    made.save(tmp_path / "query", storage=storage)
    table = Table.read(tmp_path / "query")
    assert (str(table.values.dtype), table.tokens, len(table.ngrams)) == (storage, made.tokens, 20)
    assert (table.scales is not None) == (storage == "int8")
    np.testing.assert_allclose(table.rows(), made.table.detach(), atol=0 if storage == "float32" else 0.02)
    found = encoded(LookupTower.load(tmp_path / "query"), QUERIES)
    cosine = torch.nn.functional.cosine_similarity(found, encoded(made, QUERIES))
    assert cosine.min() > (0.999 if storage == "int8" else 0.99999)


def test_a_truncated_tower_gives_the_first_values(tmp_path: Path):
    made = build(weighting="learned", with_ngrams=20)
    cut = made.truncated(3)
    torch.testing.assert_close(encoded(cut, QUERIES), encoded(made, QUERIES)[:, :3])
    cut.save(tmp_path / "query")
    assert query_tower.load(tmp_path / "query").dim == 3
    with pytest.raises(ConfigError, match="cannot be cut"):
        build(attention=True).truncated(3)


def test_rows_learn_from_their_own_queries_alone():
    made = lookup.build(LookupConfig(max_length=16), dim=DIM, tokenizer_json=LEARNT, seed=0)
    (row,) = made.prompt.rows(TEXTS[:1])
    made(collate([row], pad=0)).sum().backward()
    touched = made.table.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == sorted(set(row.ids))


def test_what_does_not_fit_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        lookup.build(LookupConfig(), dim=DIM, tokenizer_json=None, seed=0)
    with pytest.raises(ConfigError, match="none were mined"):
        lookup.build(LookupConfig(ngrams=5), dim=DIM, tokenizer_json=LEARNT, seed=0)
    with pytest.raises(ConfigError, match="made for another"):
        lookup.from_table(np.zeros((3, 4), np.float32), Tokenizer.from_str(LEARNT), max_length=8)
    with pytest.raises(ArtifactError, match="is not a tower"):
        query_tower.load(tmp_path)
    build().save(tmp_path / "query")
    (tmp_path / "query" / "tokenizer.json").write_text(backbone.train_tokenizer(TEXTS[:3], vocabulary=300))
    with pytest.raises(ArtifactError, match="is not the one"):
        query_tower.load(tmp_path / "query")


def test_a_table_of_another_version_is_told_from_a_broken_one(tmp_path: Path):
    build().save(tmp_path)
    facts = json.loads((tmp_path / "tower.json").read_text())
    (tmp_path / "tower.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "attention"}))
    with pytest.raises(ArtifactError, match=r"does not say 'attention': another version wrote it"):
        query_tower.load(tmp_path)
