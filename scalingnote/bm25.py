"""BM25 over document texts in memory, by bm25s, and the analyzer that splits texts into terms.

English, Chinese and code are each split in the way that suits BM25.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.errors import DataError

# Han, kana and hangul: scripts written without (reliable) spaces between words.
_CJK = "\u3005\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_RUN = re.compile(rf"([{_CJK}]+)|([^\W_{_CJK}]+(?:[._]+[^\W_{_CJK}]+)*)")
_SEPARATOR = re.compile(r"[._]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def terms(text: str) -> list[str]:
    """Terms of a text, in order, repeated as often as they occur.

    A word of a spaced script is one lower-case term. Of an identifier the whole and its pieces are terms:
    ``torch.nn.Conv2d`` gives ``torch.nn.conv2d torch nn conv2d``, ``DataFrame`` gives ``dataframe data
    frame``. A run of Chinese, Japanese or Korean gives its characters and its pairs of neighbours: pairs
    stand for words, characters keep one-character words and word borders findable.
    """
    found: list[str] = []
    for cjk, run in _RUN.findall(unicodedata.normalize("NFKC", text)):
        if cjk:
            found.extend(cjk)
            found.extend(cjk[i : i + 2] for i in range(len(cjk) - 1))
            continue
        words = _SEPARATOR.split(run) if "." in run or "_" in run else [run]
        if len(words) > 1:
            found.append(run.lower())
        for word in words:
            found.append(word.lower())
            if not (word.islower() or word.isupper()) and len(pieces := _CAMEL.split(word)) > 1:
                found.extend(piece.lower() for piece in pieces)
    return found


def document_texts(documents: pa.Table) -> list[str]:
    """Text of each document for BM25: title, topic and content, joined by new lines."""
    columns = (documents[name].to_pylist() for name in ("title", "topic", "content"))
    return ["\n".join(value or "" for value in row) for row in zip(*columns, strict=True)]


class BM25:
    """An immutable BM25 index (Lucene's variant of the formula)."""

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def build(cls, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> "BM25":
        """Index `texts`; score i is that of ``texts[i]``. DataError when no text has a term."""
        vocabulary: dict[str, int] = {}
        rows = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms(text)] for text in texts]
        if not vocabulary:
            raise DataError(
                f"none of {len(texts)} documents has a word to index: check title, topic, content"
            )
        import bm25s  # 0.2 s, which query encoders that only need `terms` do not pay

        index = bm25s.BM25(k1=k1, b=b, method="lucene")
        index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return cls(index)

    def scores(self, query: str) -> Float32[ndarray, " docs"]:
        """The score of every text, 0 where it shares no term with the query."""
        found: ndarray = self._index.get_scores_from_ids(self._index.get_tokens_ids(terms(query)))
        return found
