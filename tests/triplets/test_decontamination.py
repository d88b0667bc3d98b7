import re
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalingnote.triplets.collect.decontamination import (
    CLEAN,
    EXACT,
    NEAR,
    find_repeats,
    fingerprints,
    normalise,
    same_words,
)

BITS = 2**64
TEXTS = st.lists(st.text("ab 12高血々カー한", max_size=12), max_size=8)


def verdict(test: str, train: str, **knobs) -> int:
    return int(find_repeats(pa.array([train]), pa.array([test]), **knobs)[0])


# --- exact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "normal"),
    [
        ("  What is  ASTHMA ?! ", "what is asthma"),
        ("Ｗｈａｔ　ｉｓ　ａｓｔｈｍａ？", "what is asthma"),  # full width
        ("what's co-operation", "whats co operation"),
        ("糖尿病 治疗，type 2 怎么办？", "糖尿病治疗type 2怎么办"),
        ("dia\u200bbetes, ni\u00adke\ufeff", "diabetes nike"),
        ("STRASSE straße Straẞe", "strasse strasse strasse"),
        ("ΟΔΟΣ οδος", "οδοσ οδοσ"),
        ("糖尿\u200d病", "糖尿病"),
        ("C# & C++ > 5%", "c# & c++ > 5%"),  # otherwise C, C# and C++ would be equal
        ("?!…", ""),
        (None, ""),
    ],
)
def test_queries_are_normalised(query, normal):
    assert normalise(pa.array([query], pa.string())).to_pylist() == [normal]


def test_exact_duplicates_and_queries_without_a_word():
    tests = pa.array(["x y", "What is asthma", "what is asthma?", "?!", "", None, "a"])
    queries = pa.array(["What is Asthma!", "unheard of", "?", "...", None, "", "A!"])
    assert find_repeats(queries, tests).tolist() == [EXACT, CLEAN, CLEAN, CLEAN, CLEAN, CLEAN, EXACT]
    nothing = pa.array([], pa.string())
    assert find_repeats(pa.array(["a"]), nothing).tolist() == [CLEAN]
    assert len(find_repeats(nothing, pa.array(["a"]))) == 0


# --- near ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "train"),
    [
        ("what is asthma", "what is the asthma"),
        ("what is asthma", "asthma, what is"),
        ("what is asthma", "what is astma"),
        ("treatment for asthma", "treatments for asthma"),
        ("what causes hypertension in children", "what causes hypretension in children"),
        ("is the brainstem involved", "is the brain stem involved"),
        ("高血压怎么办", "高血压怎么办呢"),
        ("请问糖尿病人吃什么好", "糖尿病人吃什么好"),
    ],
)
def test_trivial_edits_are_near(test, train):
    assert verdict(test, train) == verdict(train, test) == NEAR


@pytest.mark.parametrize(
    ("test", "train"),
    [
        ("what is asthma", "what is anemia"),
        ("genetic changes related to Caffey disease", "genetic changes related to Canavan disease"),
        ("What are the symptoms of Limbic encephalitis ?", "What are the treatments for Limbic encephalitis"),
        ("do you have information about drug safety", "do you have information about safety"),
        ("how is type 1 diabetes treated", "how is type 2 diabetes treated"),
        ("高血压怎么办", "低血压怎么办"),
        ("丙肝做哪些检查", "乙肝做哪些检查"),
    ],
)
def test_other_questions_in_the_same_words_are_clean(test, train):
    assert verdict(test, train, max_distance=20) == CLEAN


def test_a_farther_fingerprint_counts_if_a_closer_one_does_not():
    tests = ["低血压怎么办", "高血压怎么办呢啊", "高血压怎么办呢", "高血压怎么办呀"]
    assert find_repeats(pa.array(["高血压怎么办"]), pa.array(tests), max_distance=20).tolist() == [NEAR]


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.integers(0, 20), st.sampled_from([0, 3]))
def test_the_search_equals_a_comparison_of_every_pair(tests, trains, max_distance, extra):
    tests, trains = pa.array(tests, pa.string()), pa.array(trains, pa.string())
    verdicts = find_repeats(trains, tests, max_distance=max_distance, extra_letters=extra)
    test_texts, texts = normalise(tests).to_pylist(), normalise(trains).to_pylist()
    for text, code, verdict in zip(texts, fingerprints(normalise(trains)), verdicts, strict=True):
        if text and text in test_texts:
            assert verdict == EXACT
            continue
        distances = np.bitwise_count(fingerprints(normalise(tests)) ^ code).tolist()
        near = any(
            text and other and distance <= max_distance and same_words(text, other, extra=extra)
            for other, distance in zip(test_texts, distances, strict=True)
        )
        assert verdict == (NEAR if near else CLEAN)


# --- fingerprints --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(TEXTS)
@example(["12 3", "3 12", "1 23", "a" * 70])
def test_fingerprints_equal_the_definition(queries):
    texts = normalise(pa.array(queries, pa.string()))
    assert fingerprints(texts).tolist() == [slow_fingerprint(text) for text in texts.to_pylist()]


def test_a_fingerprint_does_not_depend_on_its_batch():
    queries = pa.array([f"query {i} 高血压 {i * i}" for i in range(20_000)])  # more than one pass
    texts = normalise(queries)
    codes = fingerprints(texts)
    some = [0, 16_383, 16_384, 19_999]
    assert (codes[some] == fingerprints(texts.take(pa.array(some)))).all()
    chunks = pa.chunked_array([queries.slice(0, 7), queries.slice(7)])
    assert (fingerprints(normalise(chunks)) == codes).all()


def test_fingerprints_depend_on_numbers_but_not_on_word_order():
    codes = fingerprints(normalise(pa.array(["type 1 diabetes", "diabetes, type 1", "type 11 diabetes"])))
    assert codes[0] == codes[1]
    assert (codes[0] ^ codes[2]).item().bit_count() > 15


def slow_fingerprint(text: str) -> int:
    """Compute SimHash by Charikar's definition, one feature and one bit at a time."""
    cjk = "[\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff]"
    features = []
    for run in re.findall(rf"{cjk}+", text):
        features += [(ord(char),) for char in run]
        features += [(ord(a), ord(b)) for a, b in pairwise(run)]
    for word in re.sub(cjk, " ", text).split():
        padded = f" {word} "
        features += [tuple(map(ord, padded[i : i + 3])) for i in range(len(word))]
    votes = [0] * 64
    for feature in features:
        key = 0
        for code in feature:
            key = key << 21 | code
        for bit in range(64):
            votes[bit] += 1 if mix(key) >> bit & 1 else -1
    code = sum(1 << bit for bit in range(64) if votes[bit] > 0)
    numbers = 0
    for number in re.findall("[0-9]+", text):
        numbers += mix(sum(mix(ord(digit) | place << 8) for place, digit in enumerate(number)) % BITS)
    return code ^ (numbers % BITS)


def mix(key: int) -> int:
    key = (key + 0x9E3779B97F4A7C15) % BITS
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % BITS
    key = (key ^ key >> 27) * 0x94D049BB133111EB % BITS
    return key ^ key >> 31


# --- words ---------------------------------------------------------------------------------------------


def test_same_words_ignores_order_spaces_and_typing_errors():
    assert same_words("a b", "b a", extra=0)
    assert same_words("coop erate", "cooperate", extra=0)
    assert same_words("asthma of kids", "asthma kids", extra=2)
    assert not same_words("asthma of kids", "asthma kids", extra=1)
    assert not same_words("asthma kids a", "asthma kids b", extra=9)  # each lacks a word of the other
    assert not same_words("boys", "toys", extra=9)  # too short for a typing error
    assert same_words("asthmatic asthmatic", "asthmatic astmatic", extra=0)
    assert not same_words("hypotension", "hypertension", extra=9)


@settings(deadline=None)
@given(st.text("abc", min_size=5, max_size=8), st.text("abc", min_size=5, max_size=8))
def test_a_typing_error_is_one_edit_or_one_swap(one, other):
    swaps = {one[:i] + one[i + 1] + one[i] + one[i + 2 :] for i in range(len(one) - 1)}
    edits = {one[:i] + one[i + 1 :] for i in range(len(one))}
    edits |= {one[:i] + char + one[i:] for i in range(len(one) + 1) for char in "abc"}
    edits |= {one[:i] + char + one[i + 1 :] for i in range(len(one)) for char in "abc"}
    # Without another word, texts that differ only in spaces would be equal.
    assert same_words(f"x {one}", f"x {other}", extra=0) == (other in swaps | edits | {one})
