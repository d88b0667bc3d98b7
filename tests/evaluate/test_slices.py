"""Slices against filters by hand; typos are few, small and the same every time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.evaluate.test_set import add_typos, by_frequency, by_length, by_topic, slice_means
from scalingnote.words import clusters


def test_means_are_those_of_each_labels_queries():
    values = {"a": {"R@1": np.array([1.0, 0, 1, 1])}, "b": {"R@1": np.array([0.0, 0, 1, 0])}}
    found = slice_means(["x", "y", "x", "x"], values, order=["y", "z", "x"])
    assert [(one["label"], one["queries"]) for one in found] == [("y", 1), ("x", 3)]
    assert found[1]["methods"] == {"a": {"R@1": 1.0}, "b": {"R@1": 1 / 3}}


def test_lengths_fall_into_thirds():
    labels, order = by_length(["a b"] * 3 + ["a b c"] * 3 + ["a b c d e"] * 3)
    assert order == ["short (≤ 2 words)", "middle (3 words)", "long (> 3 words)"]
    assert [labels.count(label) for label in order] == [3, 3, 3]
    assert set(by_length(["one word", "two words"])[0]) == {"short (≤ 2 words)"}


def test_rare_topics_are_one_slice():
    labels, order = by_topic(["a", "b", "a", "c", ""], most=1)
    assert (labels, order) == (["a", "other", "a", "other", "other"], ["a", "other"])


def test_a_topic_called_other_is_not_the_rest():
    labels, order = by_topic(["other", "other", "b", "any other", "any other"], most=2)
    assert order == ["any other", "other", "any any other"]
    assert labels == ["other", "other", "any any other", "any other", "any other"]
    values = {"a": {"R@1": np.array([1.0, 1, 0, 0, 0])}}
    assert [one["queries"] for one in slice_means(labels, values, order=order)] == [2, 2, 1]


def test_head_and_tail_are_split_at_the_median_of_what_is_met():
    labels, order = by_frequency([0, 1, 2, 9, 0])
    assert order == ["head (word met > 2 times)", "tail (1–2 times)", "word never met"]
    assert labels == [order[2], order[1], order[1], order[0], order[2]]
    assert set(by_frequency([0, 0])[0]) == {"word never met"}


def edits(first: str, second: str) -> int:
    """Damerau's distance (optimal string alignment), by its definition."""
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
    typed = add_typos(query, share=0.3, seed=seed)
    long = sum(part in ("symptoms", "sugar") for part in parts)
    assert typed == add_typos(query, share=0.3, seed=seed)
    assert len(typed.split()) == len(parts)
    changed = [edits(a, b) for a, b in zip(parts, typed.split(), strict=True) if a != b]
    assert changed == [1] * (max(1, round(0.3 * long)) if long else 0)


def test_queries_without_blanks_get_typos_too():
    assert edits("糖尿病有什么症状", add_typos("糖尿病有什么症状", share=0.2, seed=0)) == 1
    assert add_typos("5 + 7", share=1.0, seed=0) == "5 + 7"


def test_a_typo_keeps_marks_on_their_letters():
    for seed in range(20):
        typed = add_typos("नमस्ते", share=1.0, seed=seed)
        assert typed != "नमस्ते"
        assert {*clusters(typed)} <= {"न", "म", "स्", "ते"}
