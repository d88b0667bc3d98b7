"""The planner: words of a query, how rare they are, and how much its positives repeat them."""

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
def test_words(text, expected):
    assert words(text) == expected


def test_a_word_the_dictionary_lacks_is_cut_alike_everywhere():
    name = words("斯皮仁诺")
    for text in ("斯皮仁诺能治癣吗", "医生开的斯皮仁诺", "吃斯皮仁诺有用吗"):
        found = words(text)
        assert any(found[i : i + len(name)] == name for i in range(len(found)))


@given(st.text(st.characters(exclude_categories=["Cn"]), max_size=60))
@example("⺀ 〇々")
def test_no_letter_or_digit_is_lost_and_nothing_else_is_kept(text):
    def kept(value):
        return [c for c in value if unicodedata.category(c)[0] in "LN"]

    found = words(text)
    assert kept("".join(found)) == kept(fold(text))
    assert all(c == "." or unicodedata.category(c)[0] in "LNM" for word in found for c in word)


def test_hashes_are_the_same_everywhere():
    # Fixed numbers: offline scores and online ones are joined on them.
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


# --- recall of terms ----------------------------------------------------------------------------------------

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
