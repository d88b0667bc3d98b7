import math

import pytest

from scalingnote.core.bm25 import BM25, terms

TEXTS = [
    "The sun warms the sea",
    "sea salt and sea air",
    "",
    "a DataFrame is read by pandas.read_csv",
    "空调维修价格表",
    "sun sun sun",
]


def formula(texts: list[str], query: str, k1: float, b: float) -> list[float]:
    """BM25 as written down: sum over query terms of idf times saturated term frequency."""
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
def test_scores_are_the_formula(query, k1, b):
    scores = BM25.build(TEXTS, k1=k1, b=b).scores(query)
    assert scores.tolist() == pytest.approx(formula(TEXTS, query, k1, b), rel=1e-5)


@pytest.mark.parametrize("query", ["zebra", ""])
def test_a_query_without_known_terms_scores_0(query):
    assert (BM25.build(TEXTS).scores(query) == 0).all()
