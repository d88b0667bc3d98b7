import unicodedata

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalingnote.core.words import fold
from scalingnote.triplets.planner.planner import hash_words, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is COVID-19?", ["what", "is", "covid", "19"]),
        ("Python 3.11.2, ok.", ["python", "3.11.2", "ok"]),
        ("ＡＢＣ ﬁne", ["abc", "fine"]),
        ("snake_case torch.nn", ["snake", "case", "torch", "nn"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("Straße ΛΌΓΟΣ λόγος", ["strasse", "λόγοσ", "λόγοσ"]),
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
