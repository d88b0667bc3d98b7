import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.triplets.planner import examples
from scalingnote.triplets.planner.examples import sample_positives, term_recall

LETTERS = st.lists(st.sampled_from("abcdef"), max_size=5)


@given(st.lists(LETTERS, max_size=5), st.lists(LETTERS, max_size=6), st.data())
def test_term_recall_is_its_definition(queries, texts, data):
    documents = {f"d{i}": text for i, text in enumerate(texts)}
    rows = st.lists(st.sampled_from(range(len(queries))), unique=True) if queries else st.just([])
    wanted = {doc_id: data.draw(rows) for doc_id in documents}
    found = term_recall(queries, wanted, documents.items())
    assert len(found) == len(queries)
    for row, query in enumerate(queries):
        own = [documents[d] for d in documents if row in wanted[d]]
        others = [documents[d] for d in documents if row not in wanted[d]]
        if not own:
            assert found[row] is None
            continue
        expected = []
        for word in dict.fromkeys(query):
            recall = np.mean([word in text for text in own])
            chance = np.mean([word in text for text in others]) if others else 0
            expected.append(max(0, recall - chance))
        np.testing.assert_allclose(found[row], expected, atol=1e-6)


def test_stop_words_do_not_matter():
    sentences = ("the fig of the garden", "the pear of the garden", "the plum of the house")
    texts = {f"d{i}": sentence.split() for i, sentence in enumerate(sentences)}
    queries = [["the", "fig"], ["the", "pear"], ["where", "the", "plum"]]
    wanted = {f"d{i}": [i] for i in range(3)}
    against = term_recall(queries, wanted, texts.items())
    assert [row.tolist() for row in against] == [[0, 1], [0, 1], [0, 0, 1]]


@pytest.mark.parametrize("most", [1, 2, 10])
def test_positives_are_capped_per_query_and_distinct(most, monkeypatch):
    rows = [(f"q{i}", f"d{j}") for i in range(5) for j in range(i)] * 2
    random.Random(2).shuffle(rows)
    pairs = pa.table({"query_id": [q for q, _ in rows], "doc_id": [d for _, d in rows]})
    whole = sample_positives([pairs], most=most, seed=0)
    kept = [tuple(row.values()) for row in whole.to_pylist()]
    assert len(kept) == len(set(kept))
    assert set(kept) <= set(rows)
    for i in range(5):
        assert sum(query == f"q{i}" for query, _ in kept) == min(i, most)
    assert sample_positives([], most=most, seed=0).num_rows == 0
    # What is left out on the way would not have been drawn in the end either.
    monkeypatch.setattr(examples, "_ROWS_BEFORE_FOLD", 3)
    assert sample_positives([pairs.slice(i, 2) for i in range(0, len(pairs), 2)], most=most, seed=0).equals(
        whole
    )
