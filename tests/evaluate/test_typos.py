"""Typos in queries: their number, their size, and that they are reproducible."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core.words import clusters
from scalingnote.evaluate.test_set import add_typos


def edits(first: str, second: str) -> int:
    """Compute Damerau's distance (optimal string alignment) by its definition."""
    d = np.zeros((len(first) + 1, len(second) + 1), int)
    d[:, 0], d[0, :] = range(len(first) + 1), range(len(second) + 1)
    for i in range(1, len(first) + 1):
        for j in range(1, len(second) + 1):
            d[i, j] = min(d[i - 1, j] + 1, d[i, j - 1] + 1, d[i - 1, j - 1] + (first[i - 1] != second[j - 1]))
            if i > 1 and j > 1 and first[i - 1] == second[j - 2] and first[i - 2] == second[j - 1]:
                d[i, j] = min(d[i, j], d[i - 2, j - 2] + 1)
    return int(d[-1, -1])


@given(st.lists(st.sampled_from(["symptoms", "of", "aa", "sugar", "2-5"]), min_size=1), st.integers(0, 3))
def test_each_chosen_word_is_one_edit_away(parts, seed):
    query = " ".join(parts)
    with_typos = add_typos(query, share=0.3, seed=seed)
    long_words = sum(part in ("symptoms", "sugar") for part in parts)
    assert with_typos == add_typos(query, share=0.3, seed=seed)
    assert len(with_typos.split()) == len(parts)
    distances = [edits(a, b) for a, b in zip(parts, with_typos.split(), strict=True) if a != b]
    assert distances == [1] * (max(1, round(0.3 * long_words)) if long_words else 0)


def test_queries_without_blanks_get_typos_too():
    assert edits("糖尿病有什么症状", add_typos("糖尿病有什么症状", share=0.2, seed=0)) == 1
    assert add_typos("5 + 7", share=1.0, seed=0) == "5 + 7"


def test_a_typo_keeps_marks_on_their_letters():
    for seed in range(20):
        with_typo = add_typos("नमस्ते", share=1.0, seed=seed)
        assert with_typo != "नमस्ते"
        assert {*clusters(with_typo)} <= {"न", "म", "स्", "ते"}
