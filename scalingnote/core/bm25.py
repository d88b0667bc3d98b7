"""BM25 over document texts in memory, by bm25s, and the analyzer that splits texts into terms.

English, Chinese and code are each split in the way that suits BM25; :mod:`scalingnote.core.words` makes stems
of the words.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from operator import add
from typing import Any

import pyarrow as pa
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.core import words
from scalingnote.core.errors import DataError
from scalingnote.core.words import Language, detect, stems

ANALYZER = 3  # version of `terms`: weights of documents go with queries of the same one; 2 had no language
_ASCII_RUN = re.compile(r"([^\W_]+(?:[._]+[^\W_]+)*)()", re.ASCII)  # as `_run`, and faster
_SEPARATOR = re.compile(r"[._]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def terms(text: str, language: Language = "none") -> list[str]:
    """Terms of a text, in order, repeated as often as they occur.

    A word (:mod:`scalingnote.core.words`) of a spaced script is one case-folded term. Of an identifier the
    whole and its pieces are terms: ``torch.nn.Conv2d`` gives ``torch.nn.conv2d torch nn conv2d``,
    ``DataFrame`` gives ``dataframe data frame``. A run of Chinese, Japanese, Korean, Thai, Lao, Burmese or
    Khmer gives its letters, each with its marks, and pairs of neighbours: pairs stand for words, letters keep
    words of one letter and word borders findable. All are then stems of `language`, without its stop words.
    """
    found: list[str] = []
    plain = words.plain(text)
    for run, unspaced in (_ASCII_RUN if plain.isascii() else _run()).findall(plain):
        if unspaced:
            letters = words.clusters(unspaced)
            found += letters
            found += map(add, letters, letters[1:])
            continue
        pieces = _SEPARATOR.split(run) if "." in run or "_" in run else [run]
        if len(pieces) > 1:
            found.append(run.casefold())
        for word in pieces:
            found.append(word.casefold())
            if not (word.islower() or word.isupper()) and len(parts := _CAMEL.split(word)) > 1:
                found += [part.casefold() for part in parts]
    if plain.isascii() or unicodedata.is_normalized("NFC", plain.casefold()):
        return stems(found, language)
    # Folding decomposes some Greek.
    return stems((unicodedata.normalize("NFC", term) for term in found), language)


@cache
def _run() -> re.Pattern[str]:
    """Two groups: words, with dots or underscores between them; a run of letters without spaces."""
    unspaced = words.UNSPACED + words.HANGUL
    word = words.word_of(unspaced)
    return re.compile(f"({word}(?:[._]+{word})*)|({words.run_of(unspaced)})")


def document_texts(
    documents: pa.Table | pa.RecordBatch, fields: Sequence[str] = ("title", "topic", "content")
) -> list[str]:
    """Text of each document: its fields, each on a line."""
    columns = (documents[name].to_pylist() for name in fields)
    return ["\n".join(value or "" for value in row) for row in zip(*columns, strict=True)]


class BM25:
    """An immutable BM25 index (Lucene's variant of the formula)."""

    def __init__(self, index: Any, language: Language) -> None:
        self._index, self.language = index, language

    @classmethod
    def build(
        cls, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75, language: Language | None = None
    ) -> "BM25":
        """Index `texts`; score i is that of ``texts[i]``. DataError when no text has a term.

        `language` is that of the words; None detects it.
        """
        words_of = [terms(text) for text in texts]
        language = detect(words_of) if language is None else language
        vocabulary: dict[str, int] = {}
        rows = [
            [vocabulary.setdefault(term, len(vocabulary)) for term in stems(found, language)]
            for found in words_of
        ]
        if not vocabulary:
            raise DataError(
                f"none of {len(texts)} documents has a word to index: check title, topic, content"
            )
        import bm25s  # 0.2 s, which query encoders that only need `terms` do not pay

        index = bm25s.BM25(k1=k1, b=b, method="lucene")
        index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return cls(index, language)

    def scores(self, query: str) -> Float32[ndarray, " docs"]:
        """The score of every text, 0 where it shares no term with the query."""
        found: ndarray = self._index.get_scores_from_ids(
            self._index.get_tokens_ids(terms(query, self.language))
        )
        return found
