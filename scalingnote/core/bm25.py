"""BM25 over document texts in memory, with bm25s, and the analyzer that splits texts into terms.

The analyzer splits English, Chinese and code each in the way that suits BM25. :mod:`scalingnote.core.words`
reduces the words to stems.
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

ANALYZER = 3  # version of `terms`, which must be equal for document weights and queries; 2 had no language
_ASCII_RUN = re.compile(r"([^\W_]+(?:[._]+[^\W_]+)*)()", re.ASCII)  # the same as `_run` for ASCII, and faster
_SEPARATOR = re.compile(r"[._]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def terms(text: str, language: Language = "none") -> list[str]:
    """Split a text into its terms, in order; a term repeats as often as it occurs.

    A word (:mod:`scalingnote.core.words`) of a script with spaces is one case-folded term. An identifier is a
    term, and each of its pieces is one too: ``torch.nn.Conv2d`` gives ``torch.nn.conv2d torch nn conv2d``,
    ``DataFrame`` gives ``dataframe data frame``. A run of Chinese, Japanese, Korean, Thai, Lao, Burmese or
    Khmer gives its letters, each with its marks, and the pairs of neighbouring letters: pairs represent
    words, letters keep words of one letter and word borders findable. Finally, stop words of `language` are
    removed and the other terms are reduced to stems.
    """
    raw_terms: list[str] = []
    plain = words.plain(text)
    for run, unspaced in (_ASCII_RUN if plain.isascii() else _run()).findall(plain):
        if unspaced:
            letters = words.clusters(unspaced)
            raw_terms += letters
            raw_terms += map(add, letters, letters[1:])
            continue
        pieces = _SEPARATOR.split(run) if "." in run or "_" in run else [run]
        if len(pieces) > 1:
            raw_terms.append(run.casefold())
        for word in pieces:
            raw_terms.append(word.casefold())
            if not (word.islower() or word.isupper()) and len(parts := _CAMEL.split(word)) > 1:
                raw_terms += [part.casefold() for part in parts]
    if plain.isascii() or unicodedata.is_normalized("NFC", plain.casefold()):
        return stems(raw_terms, language)
    # Folding decomposes some Greek.
    return stems((unicodedata.normalize("NFC", term) for term in raw_terms), language)


@cache
def _run() -> re.Pattern[str]:
    """Return a pattern with two groups: words joined by dots or underscores; a run of unspaced letters."""
    unspaced = words.UNSPACED + words.HANGUL
    word = words.word_of(unspaced)
    return re.compile(f"({word}(?:[._]+{word})*)|({words.run_of(unspaced)})")


def document_texts(
    documents: pa.Table | pa.RecordBatch, fields: Sequence[str] = ("title", "topic", "content")
) -> list[str]:
    """Return the text of each document: its fields, each on a line."""
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
        """Index `texts`; score i belongs to ``texts[i]``.

        Args:
            texts: to index.
            k1: saturation of term frequencies.
            b: strength of the normalization by document length.
            language: of the words; None: detected.

        Raises:
            DataError: no text has a term.
        """
        words_of = [terms(text) for text in texts]
        language = detect(words_of) if language is None else language
        vocabulary: dict[str, int] = {}
        rows = [
            [vocabulary.setdefault(term, len(vocabulary)) for term in stems(document_terms, language)]
            for document_terms in words_of
        ]
        if not vocabulary:
            raise DataError(
                f"none of {len(texts)} documents has a word to index: check title, topic, content"
            )
        import bm25s  # late: the import takes 0.2 s, and query encoders need only `terms`

        index = bm25s.BM25(k1=k1, b=b, method="lucene")
        index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return cls(index, language)

    def scores(self, query: str) -> Float32[ndarray, " docs"]:
        """Compute the score of every text; 0 if the text shares no term with the query."""
        scores: ndarray = self._index.get_scores_from_ids(
            self._index.get_tokens_ids(terms(query, self.language))
        )
        return scores
