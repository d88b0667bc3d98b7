"""The query planner: the importance of each word of a query.

    query -> words -> statistics or a learned encoder -> one score in [0, 1] per distinct word

Offline, a batch of queries becomes flat arrays that can be joined; online, one query becomes a dict.

Han characters are segmented by rjieba, a maintained Rust implementation of jieba's algorithm and dictionary
(jieba itself has had no release since 2020). It is a dictionary and a Viterbi search without a model: 24 MB,
half a second to start. Its hidden Markov model, which guesses words that the dictionary lacks, is off: a
guess depends on the neighbours, but equal words of a query and a document must be segmented equally. In
patients' questions most guesses were not words (药好, 人能, 吃些), and without them more of a query's words
(39.3 %, not 38.2 %) occurred in its answer. Text that the dictionary lacks becomes shorter words.

Other scripts, including Korean, separate words by spaces. In scripts that do not (Japanese kana, Thai), a run
of characters is one word.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
import pyarrow as pa
from jaxtyping import Float32, Float64, Int64, UInt64
from numpy import ndarray
from rjieba import Jieba

from scalingnote.core.config import validate
from scalingnote.core.words import HAN, fold, run_of, word_of
from scalingnote.storage.artifact import Artifact
from scalingnote.triplets.config import Learned

HALF = 0.01  # a word in this share of the texts has importance 0.5
SATURATION = 3.0  # slope of importance on both sides of 0.5
WORD_COUNTS = pa.schema({"word": pa.string(), "df": pa.int64()})


def words(text: str) -> list[str]:
    """Split a text into all its words, in order, in the form of :func:`scalingnote.core.words.fold`."""
    out: list[str] = []
    for han, word in _run().findall(fold(text)):
        if han:
            out.extend(_segmenter().cut(han, False))
        else:
            out.append(word)
    return out


def hash_words(words: Sequence[str]) -> UInt64[ndarray, " words"]:
    """Compute a 64-bit hash of each word, the same in every process and on every machine."""
    # pandas: SipHash in C, with a fixed key.
    hashes: ndarray = pd.util.hash_array(np.array(words, dtype=object), categorize=False)
    return hashes


@cache
def _run() -> re.Pattern[str]:
    """Return the pattern of words, with two groups: a run of Han; a number with points, or another word."""
    return re.compile(rf"({run_of(HAN)})|(\d+(?:\.\d+)+|{word_of(HAN)})")


@cache
def _segmenter() -> Jieba:
    """Return a private copy of the dictionary, because any code can add words to rjieba's global one."""
    return Jieba()


@dataclass(frozen=True)
class TermScores:
    """Importances of the distinct words of queries: query i has the entries offsets[i] to offsets[i + 1].

    There is one entry per distinct word of a query, in order of first occurrence. A word is represented by
    its stable 64-bit hash.
    """

    offsets: Int64[ndarray, " offsets"]  # one more than there are queries
    terms: UInt64[ndarray, " terms"]
    scores: Float32[ndarray, " terms"]

    def to_arrow(self) -> pa.Table:
        """Convert to a table with one row per query, with the lists `terms` and `scores`."""
        offsets = pa.array(self.offsets.astype(np.int32))  # one bucket or slice has fewer than 2^31 terms
        columns = {"terms": self.terms, "scores": self.scores}
        return pa.table(
            {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in columns.items()}
        )

    @classmethod
    def from_arrow(cls, table: pa.Table) -> "TermScores":
        """Convert a table of :meth:`to_arrow` back."""
        terms, scores = (table[name].combine_chunks() for name in ("terms", "scores"))
        lengths = terms.value_lengths().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(offsets, terms.flatten().to_numpy(), scores.flatten().to_numpy())


def importance(df: Int64[ndarray, " words"], *, texts: int) -> Float64[ndarray, " words"]:
    """Compute importance from corpus statistics: rare words are important.

        share      p = (df + 1/2) / (texts + 1)             of the texts with the word, never 0 or 1
        idf        i = -ln p
        importance   = i^s / (i^s + h^s),   h = -ln HALF    0 for p -> 1, 1/2 at p = HALF, 1 for p -> 0

    Only the share is relevant, not the size of the corpus. The importance of stop words is almost 0 without a
    list, because most texts have them. Importances of shares of 50 %, 10 %, 1 %, 0.1 % and 0.001 % are 0.00,
    0.11, 0.50, 0.77 and 0.94, with HALF = 0.01 and s = SATURATION = 3.

    Args:
        df: number of texts with each word.
        texts: number of texts.
    """
    idf = -np.log((df + 0.5) / (texts + 1))
    scores: ndarray = 1 / (1 + (-np.log(HALF) / idf) ** SATURATION)
    return scores


class WordStatistics:
    """Scorer of words by lookup. It stores a hash and a score per word: 12 MB for a million words."""

    def __init__(self, counts: pa.Table, *, texts: int) -> None:
        # The last score is that of words without a count.
        df = np.append(counts["df"].to_numpy(), 0)
        scores = importance(df, texts=texts)
        hashes = hash_words(counts["word"].to_pylist())
        order = np.argsort(hashes)
        self._hashes = hashes[order]
        self._scores = scores[:-1][order].astype(np.float32)
        self._unknown = np.float32(scores[-1])

    def __call__(self, texts: Sequence[Sequence[str]]) -> Float32[ndarray, " terms"]:
        """Score texts, see :data:`Scorer`."""
        hashes = hash_words([word for text in texts for word in dict.fromkeys(text)])
        if not len(self._hashes):
            return np.full(len(hashes), self._unknown)
        at = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._scores[at], self._unknown)


# Words of each text -> scores of its distinct words, in order of first occurrence, text after text.
Scorer = Callable[[Sequence[Sequence[str]]], Float32[ndarray, " terms"]]


class Planner:
    """Scorer of the words of queries.

    Args:
        score: statistics (:class:`WordStatistics`) or a learned encoder (``TermRegressor.score``).
    """

    def __init__(self, score: Scorer) -> None:
        self._score = score

    def term_scores(self, queries: Sequence[str]) -> TermScores:
        """Compute importances of the hashed distinct words of each query; a query may have no words."""
        texts = [words(query) for query in queries]
        distinct = [list(dict.fromkeys(text)) for text in texts]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in distinct], out=offsets[1:])
        return TermScores(offsets, hash_words([word for row in distinct for word in row]), self._score(texts))

    def importances(self, query: str) -> dict[str, float]:
        """Compute word -> importance, most important first; ties are in the order of the query."""
        text = words(query)
        score_of_words = zip(dict.fromkeys(text), self._score([text]).tolist(), strict=True)
        return dict(sorted(score_of_words, key=lambda item: -item[1]))


def load(artifact: Artifact) -> Planner:
    """Load the planner of a `planner` artifact; it does not need Ray or the dataset."""
    facts = artifact.read_json("planner.json")
    words("词")  # reads the segmenter's dictionary before the first query, which takes half a second
    if facts["config"]["kind"] == "statistics":
        table = artifact.table("words.parquet")
        return Planner(WordStatistics(table, texts=facts["texts"]))
    # Imported late, because processes with word statistics do not need torch.
    from scalingnote.triplets.planner.learned import TermRegressor

    learned = validate(Learned, facts["config"], source=artifact.uri)
    encoder = TermRegressor.load(artifact.directory("encoder"), max_length=learned.max_length)
    return Planner(encoder.score)
