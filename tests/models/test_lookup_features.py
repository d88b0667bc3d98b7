"""Rows of pairs and end tokens: which there are, what they add, and that a saved table gives the same."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import tiny
from scalingnote.encode.lookup import LookupEncoder
from scalingnote.models import backbone, lookup_table
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup import LookupStart, LookupTower, build
from scalingnote.models.lookup_table import LookupFeatures

TEXTS = [row["content"] for row in tiny.document_rows(40)]
LEARNT = backbone.train_tokenizer(TEXTS, vocabulary=400)
TOKENS = Tokenizer.from_str(LEARNT).get_vocab_size()


def ids_of(texts: list[str]) -> list[list[int]]:
    return [found.ids for found in Tokenizer.from_str(LEARNT).encode_batch(texts, add_special_tokens=False)]


def test_frequent_pairs_and_ends_are_learnt_and_found_again():
    texts = [[1, 2, 3], [1, 2, 4], [5], [1, 2]]
    pairs = LookupFeatures(lookup_table.frequent_features(texts, tokens=10, bigrams=5, ends=False), tokens=10)
    assert len(pairs) == 1  # (1, 2) alone occurs twice
    assert pairs.extend([1, 2, 1, 2]) == [1, 2, 1, 2, 10, 10]
    assert pairs.extend([2, 1]) == [2, 1]
    both = LookupFeatures(lookup_table.frequent_features(texts, tokens=10, bigrams=5, ends=True), tokens=10)
    # The pair; 1 as the first token and as the last but one, 2 as the second.
    assert sorted(both.extend([1, 2, 3])[3:]) == [10, 11, 12, 13][: len(both)]
    assert both.extend([]) == []
    none = lookup_table.frequent_features(texts, tokens=10, bigrams=0, ends=False)
    assert LookupFeatures(none, tokens=10).extend([1, 2]) == [1, 2]


def tower(*, attention: bool = False) -> LookupTower:
    config = LookupConfig(weighting="learned", attention=attention, bigrams=50, ends=True, storage="float32")
    keys = lookup_table.frequent_features(ids_of(TEXTS), tokens=TOKENS, bigrams=50, ends=True)
    features = LookupFeatures(keys, tokens=TOKENS)
    counts = np.bincount([token for ids in ids_of(TEXTS) for token in ids], minlength=TOKENS)
    weights = lookup_table.start_weights(counts, features)
    made = build(config, dim=16, tokenizer_json=LEARNT, seed=0, start=LookupStart(keys, weights))
    with torch.no_grad():
        made.table[TOKENS:] = torch.randn(len(keys), 16, generator=torch.Generator().manual_seed(1))
    return made


def test_features_start_at_nothing_and_rare_tokens_weigh_most():
    made = tower()
    weights = made.log_weights.detach().exp()
    ids = ids_of(TEXTS)
    counts = np.bincount([token for row in ids for token in row], minlength=TOKENS)
    common, rare = int(counts.argmax()), int(np.flatnonzero(counts == 1)[0])
    assert weights[common] < weights[rare] < 1
    config = LookupConfig(bigrams=50)
    keys = lookup_table.frequent_features(ids, tokens=TOKENS, bigrams=50, ends=False)
    plain = build(config, dim=16, tokenizer_json=LEARNT, seed=0)
    started = build(config, dim=16, tokenizer_json=LEARNT, seed=0, start=LookupStart(keys))
    assert not started.table[TOKENS:].any()
    torch.testing.assert_close(started.table[:TOKENS], plain.table)


def test_a_saved_table_encodes_as_the_tower_does(tmp_path: Path):
    for attention in (False, True):
        made = tower(attention=attention).eval()
        made.save(tmp_path / str(attention))
        queries = [*TEXTS[:20], "", "ba", "entirely other words"]
        rows = made.prompt.rows(queries)
        with torch.no_grad():
            expected = made(collate(rows, pad=made.pad))[:, 0].numpy()
        encoder = LookupEncoder(tmp_path / str(attention))
        np.testing.assert_allclose(encoder.encode(queries), expected, rtol=1e-4, atol=1e-5)
        for query, embedding in zip(queries[:3], expected, strict=False):
            np.testing.assert_allclose(encoder.encode([query])[0], embedding, rtol=1e-4, atol=1e-5)
        again = LookupTower.load(tmp_path / str(attention))
        with torch.no_grad():
            np.testing.assert_allclose(
                again(collate(again.prompt.rows(queries), pad=0))[:, 0], expected, rtol=1e-4, atol=1e-5
            )
