"""The planner: words of a query, their rarity, and their recall in its positives."""

import math
import random
import unicodedata
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalingnote.core.words import fold
from scalingnote.encode.lexical.words import add_counts, count_words, most_frequent
from scalingnote.triplets.planner import examples
from scalingnote.triplets.planner.examples import sample_positives, term_recall
from scalingnote.triplets.planner.planner import (
    WORD_COUNTS,
    Planner,
    WordStatistics,
    hash_words,
    importance,
    words,
)

# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is COVID-19?", ["what", "is", "covid", "19"]),
        ("Python 3.11.2, ok.", ["python", "3.11.2", "ok"]),
        ("snake_case torch.nn", ["snake", "case", "torch", "nn"]),
        ("한국어 검색", ["한국어", "검색"]),
        ("高血压患者能吃党参吗？", ["高血压", "患者", "能", "吃", "党参", "吗"]),
        ("维生素B12缺乏", ["维生素", "b12", "缺乏"]),
        ("dia\u200bbetes ni\u00adke\ufeff 糖尿\u200d病", ["diabetes", "nike", "糖尿病"]),
        ("", []),
        ("?!… \ud800\x00", []),
    ],
)
def test_texts_are_split_into_words(text, expected):
    assert words(text) == expected


def test_an_unknown_word_is_divided_equally_in_any_text():
    name = words("斯皮仁诺")
    for text in ("斯皮仁诺能治癣吗", "医生开的斯皮仁诺", "吃斯皮仁诺有用吗"):
        text_words = words(text)
        assert any(text_words[i : i + len(name)] == name for i in range(len(text_words)))


@given(st.text(st.characters(exclude_categories=["Cn"]), max_size=60))
@example("⺀ 〇々")
def test_words_have_all_letters_and_digits_of_the_text(text):
    def letters_of(value):
        return [c for c in value if unicodedata.category(c)[0] in "LN"]

    text_words = words(text)
    assert letters_of("".join(text_words)) == letters_of(fold(text))
    assert all(c == "." or unicodedata.category(c)[0] in "LNM" for word in text_words for c in word)


def test_hashes_are_the_same_everywhere():
    # Fixed numbers, because offline and online scores are joined by them.
    expected = np.array([13950350942979735504, 419214943825860997], dtype=np.uint64)
    np.testing.assert_array_equal(hash_words(["a", "糖尿病"]), expected)
    assert hash_words([]).shape == (0,)


# --- importance ---------------------------------------------------------------------------------------------

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
def test_rare_words_are_important_and_stop_words_are_not(texts, query, best, unimportant):
    importances = planner(texts).importances(query)
    assert list(importances)[:2] == best
    assert importances[best[0]] > 0.6 > importances[best[1]] > 0.1
    assert all(importances[word] < 0.01 for word in unimportant)


def test_importance_is_the_documented_formula():
    for texts, df in [(10, 1), (1000, 10), (1000, 999), (10**8, 3), (5, 0)]:
        idf = -math.log((df + 0.5) / (texts + 1))
        half = -math.log(0.01)
        expected = idf**3 / (idf**3 + half**3)
        computed = importance(np.array([df]), texts=texts)
        assert computed[0] == pytest.approx(expected, rel=1e-12)


def test_unknown_and_rare_words_have_the_same_importance():
    assert planner(ENGLISH).importances("zebra") == {"zebra": pytest.approx(0.84, abs=0.01)}
    # A word that is too rare to be kept is treated as unknown.
    rare = planner(ENGLISH, least=3)
    assert rare.importances("pomology")["pomology"] == rare.importances("zebra")["zebra"]
    empty = WordStatistics(WORD_COUNTS.empty_table(), texts=0)
    assert 0 <= Planner(empty).importances("zebra")["zebra"] <= 1


QUERIES = ["a fig and a fig", "", "zebra the zebra", "?", "the of a is", "糖尿病 fig 2.5"]


def test_arrays_and_dicts_have_the_same_importances():
    statistics = planner(ENGLISH)
    assert statistics.term_scores([]).offsets.tolist() == [0]
    scores = statistics.term_scores(QUERIES)
    assert scores.offsets.tolist() == [0, 3, 3, 5, 5, 9, 12]
    assert scores.scores.dtype == np.float32
    for i, query in enumerate(QUERIES):
        entries = slice(scores.offsets[i], scores.offsets[i + 1])
        terms = list(dict.fromkeys(words(query)))
        np.testing.assert_array_equal(scores.terms[entries], hash_words(terms))
        by_word = dict(zip(terms, scores.scores[entries].tolist(), strict=True))
        importances = statistics.importances(query)
        assert importances == by_word
        # Most important first; equal ones in the order of the query.
        assert list(importances) == sorted(terms, key=lambda word: (-by_word[word], terms.index(word)))


def test_counts_do_not_depend_on_order_and_parts_of_texts():
    texts = ENGLISH[:200] + CHINESE[:200]
    expected = most_frequent(counted(texts), 1000)
    random.Random(5).shuffle(texts)
    parts = [counted(texts[i : i + 37]) for i in range(0, len(texts), 37)]
    assert most_frequent(add_counts(pa.concat_tables(parts)), 1000).equals(expected)
    slow = Counter(word for text in texts for word in set(words(text)))
    rows = sorted(slow.items(), key=lambda row: (-row[1], row[0]))
    assert list(zip(expected["word"].to_pylist(), expected["documents"].to_pylist(), strict=True)) == rows
    assert most_frequent(expected, 2).equals(expected.slice(0, 2))


# --- recall of terms ----------------------------------------------------------------------------------------

LETTERS = st.lists(st.sampled_from("abcdef"), max_size=5)


@given(st.lists(LETTERS, max_size=5), st.lists(LETTERS, max_size=6), st.data())
def test_term_recall_equals_its_definition(queries, texts, data):
    documents = {f"d{i}": text for i, text in enumerate(texts)}
    rows = st.lists(st.sampled_from(range(len(queries))), unique=True) if queries else st.just([])
    queries_of = {doc_id: data.draw(rows) for doc_id in documents}
    targets = term_recall(queries, queries_of, documents.items())
    assert len(targets) == len(queries)
    for row, query in enumerate(queries):
        positives = [documents[d] for d in documents if row in queries_of[d]]
        others = [documents[d] for d in documents if row not in queries_of[d]]
        if not positives:
            assert targets[row] is None
            continue
        expected = []
        for word in dict.fromkeys(query):
            recall = np.mean([word in text for text in positives])
            chance = np.mean([word in text for text in others]) if others else 0
            expected.append(max(0, recall - chance))
        np.testing.assert_allclose(targets[row], expected, atol=1e-6)


def test_stop_words_have_no_recall():
    sentences = ("the fig of the garden", "the pear of the garden", "the plum of the house")
    texts = {f"d{i}": sentence.split() for i, sentence in enumerate(sentences)}
    queries = [["the", "fig"], ["the", "pear"], ["where", "the", "plum"]]
    queries_of = {f"d{i}": [i] for i in range(3)}
    targets = term_recall(queries, queries_of, texts.items())
    assert [row.tolist() for row in targets] == [[0, 1], [0, 1], [0, 0, 1]]


@pytest.mark.parametrize("most", [1, 2, 10])
def test_positives_are_capped_per_query_and_distinct(most, monkeypatch):
    rows = [(f"q{i}", f"d{j}") for i in range(5) for j in range(i)] * 2
    random.Random(2).shuffle(rows)
    pairs = pa.table({"query_id": [q for q, _ in rows], "doc_id": [d for _, d in rows]})
    sample = sample_positives([pairs], most=most, seed=0)
    sampled_pairs = [tuple(row.values()) for row in sample.to_pylist()]
    assert len(sampled_pairs) == len(set(sampled_pairs))
    assert set(sampled_pairs) <= set(rows)
    for i in range(5):
        assert sum(query == f"q{i}" for query, _ in sampled_pairs) == min(i, most)
    assert sample_positives([], most=most, seed=0).num_rows == 0
    # Pairs that are left out early would not be drawn at the end either.
    monkeypatch.setattr(examples, "_ROWS_BEFORE_FOLD", 3)
    assert sample_positives([pairs.slice(i, 2) for i in range(0, len(pairs), 2)], most=most, seed=0).equals(
        sample
    )
