"""BM25 by shards has the rows, scores and ties of bm25s over all texts, bit for bit, for any shards."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core import topk
from scalingnote.core.bm25 import BM25, terms
from scalingnote.encode.lexical.weights import SHARD, BM25Weights, build_shard, search
from scalingnote.encode.lexical.words import WORDS, add_counts, count_words, most_frequent

TEXTS = [
    "torch.nn.Conv2d applies a convolution",
    "join tensors, join TENSORS along a dimension",
    "",
    "join tensors, join TENSORS along a dimension",
    "张量需要相同的形状",
    "a a a b b c",
    "b",
]
QUERIES = ["join tensors", "tensors tensors a", "张量的形状", "a b c a", "nothing here is known", "", "b"]


def shards_of(texts: list[str], shard: int, k1: float = 1.2, b: float = 0.75) -> list[tuple[int, pa.Table]]:
    """Build shards of `shard` texts, each with the number of its first text."""
    words, totals = count_words(map(terms, texts))
    words = most_frequent(add_counts(words), 1000)
    weights = BM25Weights(words, documents=len(texts), length=totals["length"], k1=k1, b=b)
    starts = range(0, len(texts), shard)
    return [(start, build_shard(texts[start : start + shard], weights)) for start in starts]


def ranked(texts: list[str], queries: list[str], *, shard: int, k: int, k1: float, b: float):
    """Search shards of `shard` texts; return rows and scores."""
    shards = shards_of(texts, shard, k1, b)
    assert all(table.schema == SHARD for _, table in shards)
    rows, scores = search(shards, queries, k)
    # A search in two groups of shards, merged, has the same result.
    runs = [search(run, queries, k) for run in (shards[: len(shards) // 2], shards[len(shards) // 2 :])]
    merged = topk.merge(*(np.concatenate([run[i] for run in runs], axis=1) for i in (1, 0)), k=k)
    assert merged[1].tolist() == rows.tolist()
    assert merged[0].tolist() == scores.tolist()
    return rows, np.where(rows < 0, 0, scores)


def ranked_by_bm25s(texts: list[str], queries: list[str], k: int, **constants: float):
    """Rank by the scores of all texts, with -1 and 0 for texts that share no term with the query."""
    index = BM25.build(texts, **constants)
    every = np.zeros((len(queries), max(len(texts), k)), np.float32)
    every[:, : len(texts)] = [index.scores(query) for query in queries]
    rows = topk.select(every, k=k)
    scores = np.take_along_axis(every, rows, axis=1)
    return np.where(scores > 0, rows, -1), scores


@pytest.mark.parametrize("shard", [1, 3, 100])
@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (0.4, 1.0), (0.0, 0.0)])
def test_shards_rank_like_bm25s(shard: int, k1: float, b: float):
    rows, scores = ranked(TEXTS, QUERIES, shard=shard, k=4, k1=k1, b=b)
    expected_rows, expected_scores = ranked_by_bm25s(TEXTS, QUERIES, 4, k1=k1, b=b)
    assert rows.tolist() == expected_rows.tolist()
    assert scores.tolist() == expected_scores.tolist()
    assert rows[0, 0] == 1  # equal texts tie: the first comes first
    assert rows[0, 1] == 3


@given(
    st.lists(st.text("abcdef ", max_size=30), min_size=1, max_size=40),
    st.lists(st.text("abcdefg ", max_size=12), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 8),
)
def test_any_texts_rank_like_in_bm25s(texts: list[str], queries: list[str], shard: int, k: int):
    texts = [*texts, "a"]
    rows, scores = ranked(texts, queries, shard=shard, k=k, k1=1.2, b=0.75)
    expected_rows, expected_scores = ranked_by_bm25s(texts, queries, k)
    assert rows.tolist() == expected_rows.tolist()
    assert scores.tolist() == expected_scores.tolist()


def test_a_shard_without_words_finds_nothing():
    words = WORDS.empty_table()
    weights = BM25Weights(words, documents=3, length=1, k1=1.2, b=0.75)
    rows, scores = search([(0, build_shard(["a", ""], weights))], ["a"], 2)
    assert rows.tolist() == [[-1, -1]]
    assert scores.tolist() == [[-np.inf, -np.inf]]


def test_shards_do_not_depend_on_the_hash_seed():
    code = (
        "import hashlib; from test_ranking import TEXTS, shards_of;"
        "texts = [str(table.to_pydict()) for _, table in shards_of(TEXTS, 3)];"
        "print([hashlib.md5(text.encode()).hexdigest() for text in texts])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
