import math
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.encode.lexical.words import add_counts, count_words, most_frequent
from scalingnote.triplets.planner.planner import (
    WORD_COUNTS,
    Planner,
    WordStatistics,
    hash_words,
    importance,
    words,
)

FOODS = ["apple", "pear", "plum", "fig", "grape", "melon", "cherry", "lemon", "peach", "quince"]
ENGLISH = [f"the {food} is a fruit of tree number {i}" for i in range(150) for food in FOODS]
ENGLISH[7] += " pomology"
ENGLISH[8] += " pomology"
DISEASES = ["糖尿病", "高血压", "肺炎", "胃炎", "贫血", "癫痫", "哮喘", "肝硬化", "关节炎", "中风"]
CHINESE = [f"{disease}的患者要吃药, 第{i}种" for i in range(150) for disease in DISEASES]
CHINESE[3] += ", 党参是可以的"
CHINESE[9] += ", 党参是可以的"


def counted(texts):
    return count_words(map(words, texts))[0]


def planner(texts, least=2):
    counts = counted(texts).rename_columns(WORD_COUNTS.names)
    counts = counts.filter(pc.greater_equal(counts["df"], least))
    return Planner(WordStatistics(counts, texts=len(texts)))


@pytest.mark.parametrize(
    ("texts", "query", "best", "unimportant"),
    [
        (
            ENGLISH,
            "is the pomology of a fig the fruit",
            ["pomology", "fig"],
            ["is", "the", "of", "a", "fruit"],
        ),
        (CHINESE, "糖尿病的患者要吃药, 党参", ["党参", "糖尿病"], ["的", "患者"]),
    ],
)
def test_rare_words_matter_and_stop_words_do_not(texts, query, best, unimportant):
    found = planner(texts).importances(query)
    assert list(found)[:2] == best
    assert found[best[0]] > 0.6 > found[best[1]] > 0.1
    assert all(found[word] < 0.01 for word in unimportant)


def test_importance_is_the_written_formula():
    for texts, df in [(10, 1), (1000, 10), (1000, 999), (10**8, 3), (5, 0)]:
        idf = -math.log((df + 0.5) / (texts + 1))
        half = -math.log(0.01)
        expected = idf**3 / (idf**3 + half**3)
        found = importance(np.array([df]), texts=texts)
        assert found[0] == pytest.approx(expected, rel=1e-12)


@given(
    st.integers(1, 10**9),
    st.lists(st.floats(0, 1), min_size=2, max_size=8),
)
def test_importance_stays_in_bounds_and_falls_with_df(texts, shares):
    df = np.array(sorted(int(share * texts) for share in shares))
    found = importance(df, texts=texts)
    assert ((found >= 0) & (found <= 1)).all()
    assert (np.diff(found) <= 0).all()


def test_unknown_words():
    assert planner(ENGLISH).importances("zebra") == {"zebra": pytest.approx(0.84, abs=0.01)}
    # A word that is too rare to be kept is as unknown as one that never was.
    rare = planner(ENGLISH, least=3)
    assert rare.importances("pomology")["pomology"] == rare.importances("zebra")["zebra"]
    empty = WordStatistics(WORD_COUNTS.empty_table(), texts=0)
    assert 0 <= Planner(empty).importances("zebra")["zebra"] <= 1


QUERIES = ["a fig and a fig", "", "zebra the zebra", "?", "the of a is", "糖尿病 fig 2.5"]


def test_arrays_and_dicts_say_the_same():
    built = planner(ENGLISH)
    assert built.term_scores([]).offsets.tolist() == [0]
    scores = built.term_scores(QUERIES)
    assert scores.offsets.tolist() == [0, 3, 3, 5, 5, 9, 12]
    assert scores.scores.dtype == np.float32
    for i, query in enumerate(QUERIES):
        own = slice(scores.offsets[i], scores.offsets[i + 1])
        terms = list(dict.fromkeys(words(query)))
        np.testing.assert_array_equal(scores.terms[own], hash_words(terms))
        by_word = dict(zip(terms, scores.scores[own].tolist(), strict=True))
        found = built.importances(query)
        assert found == by_word
        # Most important first; of words that tie, the one that comes first in the query.
        assert list(found) == sorted(terms, key=lambda word: (-by_word[word], terms.index(word)))


def test_counts_do_not_depend_on_how_the_texts_come():
    texts = ENGLISH[:200] + CHINESE[:200]
    whole = most_frequent(counted(texts), 1000)
    random.Random(5).shuffle(texts)
    parts = [counted(texts[i : i + 37]) for i in range(0, len(texts), 37)]
    assert most_frequent(add_counts(pa.concat_tables(parts)), 1000).equals(whole)
    slow = Counter(word for text in texts for word in set(words(text)))
    rows = sorted(slow.items(), key=lambda row: (-row[1], row[0]))
    assert list(zip(whole["word"].to_pylist(), whole["documents"].to_pylist(), strict=True)) == rows
    assert most_frequent(whole, 2).equals(whole.slice(0, 2))
