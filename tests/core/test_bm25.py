"""BM25 equals its formula over the terms of texts; words of a language become stems, and identify it."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import Stemmer

from scalingnote.core.bm25 import BM25, terms
from scalingnote.core.words import DETECTED, Language, detect, stems, stop_words

TEXTS = [
    "The sun warms the sea",
    "sea salt and sea air",
    "",
    "a DataFrame is read by pandas.read_csv",
    "空调维修价格表",
    "sun sun sun",
]


def formula(texts: list[str], query: str, k1: float, b: float) -> list[float]:
    """Compute BM25 by its definition: sum over query terms of idf times saturated term frequency."""
    documents = [terms(text) for text in texts]
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for term in terms(query):
            frequency = sum(other == term for other in document)
            holders = sum(term in other for other in documents)
            idf = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
            score += idf * frequency / (frequency + k1 * (1 - b + b * len(document) / average))
        scores.append(score)
    return scores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Sun, the sea!", ["the", "sun", "the", "sea"]),
        ("torch.nn.Conv2d", ["torch.nn.conv2d", "torch", "nn", "conv2d"]),
        ("read_csv", ["read_csv", "read", "csv"]),
        ("DataFrame", ["dataframe", "data", "frame"]),
        ("HTTPServer", ["httpserver", "http", "server"]),
        ("NASA end.", ["nasa", "end"]),
        ("空调维修", ["空", "调", "维", "修", "空调", "调维", "维修"]),
        ("买iPhone吗", ["买", "iphone", "i", "phone", "吗"]),
        ("Ｃａｆé __init__", ["café", "init"]),
        (" ,。", []),
    ],
)
def test_terms(text, expected):
    assert terms(text) == expected


@pytest.mark.parametrize("query", ["sea", "the sun", "sea sea", "pandas.read_csv", "空调价格"])
@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (0.9, 0.4)])
def test_scores_equal_the_formula(query, k1, b):
    scores = BM25.build(TEXTS, k1=k1, b=b).scores(query)
    assert scores.tolist() == pytest.approx(formula(TEXTS, query, k1, b), rel=1e-5)


@pytest.mark.parametrize("query", ["zebra", ""])
def test_a_query_without_known_terms_scores_0(query):
    assert (BM25.build(TEXTS).scores(query) == 0).all()


# --- languages ----------------------------------------------------------------------------------------------

ENGLISH = [
    "It is the key that was given to you, and it will not be used again by those who have it.",
    "If you have to ask for it, then there is no need for us to be here with all of them.",
]
PORTUGUESE = [
    "Ele disse que não sabia se a chave era dele ou da sua mãe, mas que ela estava com os outros na casa.",
    "Quando eu for para lá, vou ver como é que tudo isto se faz e qual é o seu nome, sem que ele me veja.",
]
CATALAN = [  # shares i, en, de, den with Scandinavian languages
    "Tots els éssers humans neixen lliures i iguals en dignitat i en drets. Són dotats de raó i consciència.",
    "El noi de la casa en té una i vol que la resta de la gent en parli amb els altres en català i anglès.",
]
PRODUCTS = ["Xerox 006R90321 toner cartridge Original Black", "Canon ink tank cyan 12 ml", "HP toner, black"]


def split(texts: Sequence[str]) -> list[list[str]]:
    return [terms(text) for text in texts]


@pytest.mark.parametrize(
    ("texts", "language"),
    [
        (ENGLISH, "english"),
        (PORTUGUESE, "portuguese"),
        (CATALAN, "none"),
        (PRODUCTS, "none"),
        (["张量需要相同的形状。torch.cat 把它们连接起来。"], "none"),
        ([""], "none"),
        ([], "none"),
        ([*ENGLISH, *PRODUCTS], "english"),
    ],
)
def test_frequent_words_decide_the_language(texts: list[str], language: str):
    assert detect(split(texts)) == language


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("english", "How do I install the installed installers?", ["instal", "instal", "instal"]),
        ("english", "torch.nn.Conv2d of DataFrames", ["torch.nn.conv2d", "torch", "nn", "conv2d"]),
        ("german", "für die Häuser und Straßen", ["haus", "strass"]),
        ("russian", "в книгах и книги", ["книг", "книг"]),
        ("french", "l'homme des maisons", ["homm", "maison"]),
        ("finnish", "taloissa ja talon", ["talo", "ja", "talo"]),  # stems without a list of stop words
        ("english", "空调维修 installs", ["空", "调", "维", "修", "空调", "调维", "维修", "instal"]),
        ("none", "the installed", ["the", "installed"]),
    ],
)
def test_terms_are_stems_without_stop_words(language: Language, text: str, expected: list[str]):
    actual = terms(text, language)
    assert actual[: len(expected)] == expected
    assert language == "none" or stems(terms(text), language) == actual


def test_languages_equal_those_of_snowball():
    assert {*get_args(Language)} == {"none", *Stemmer.algorithms()} - {"porter", "dutch_porter"}
    assert {*DETECTED} == {
        language for language in get_args(Language) if language != "none" and stop_words(language)
    }


def test_no_stem_is_empty():
    words = [word for language in DETECTED for word in stop_words(language)]
    assert all(all(stems(words, language)) for language in get_args(Language))


def test_threads_get_the_same_stems():
    words = [f"{start}{end}" for start in ("install", "weigh", "search") for end in ("s", "ing", "ed", "ers")]
    with ThreadPoolExecutor(8) as pool:
        results = [*pool.map(lambda _: stems(words, "english"), range(64))]
    assert all(one == results[0] for one in results)
    assert {*results[0]} == {"instal", "weigh", "weigher", "search", "searcher"}


def test_forms_of_a_word_match_in_the_language_of_the_texts():
    bm25 = BM25.build([*ENGLISH, "Rotating the keys of a service"])
    assert bm25.language == "english"
    assert bm25.scores("how was a key rotated").argmax() == 2
    assert not bm25.scores("how was it that the").any()  # only stop words
    as_written = BM25.build([*ENGLISH, "Rotating the keys of a service"], language="none")
    assert as_written.scores("rotated").max() == 0 < bm25.scores("rotated").max()
