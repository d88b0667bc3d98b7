"""The planner: queries in, the importance of each of their words out.

    query -> words -> backend (statistics or learned) -> one score in [0, 1] per distinct word

Offline a batch of queries becomes numbers that can be joined on; online one query becomes a dict.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.config import validate
from scalingnote.planner.config import Learned, Statistics
from scalingnote.planner.terms import TermScores
from scalingnote.planner.words import hash_words, words
from scalingnote.storage.artifact import Artifact

# The words of each text, as they stand -> the scores of its distinct words, in order of first occurrence,
# text after text.
Scorer = Callable[[Sequence[Sequence[str]]], Float32[ndarray, " terms"]]


class Planner:
    """Scores the words of queries with one backend."""

    def __init__(self, score: Scorer) -> None:
        self._score = score

    def term_scores(self, queries: Sequence[str]) -> TermScores:
        """Hashed words and their importances, as in :func:`hash_words`; a query without a word has none."""
        texts = [words(query) for query in queries]
        distinct = [list(dict.fromkeys(text)) for text in texts]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in distinct], out=offsets[1:])
        return TermScores(offsets, hash_words([word for row in distinct for word in row]), self._score(texts))

    def importances(self, query: str) -> dict[str, float]:
        """Word -> importance, the most important first; words that tie stand as in the query."""
        text = words(query)
        scores = self._score([text]).tolist()
        found = zip(dict.fromkeys(text), scores, strict=True)
        return dict(sorted(found, key=lambda item: -item[1]))


def load(artifact: Artifact) -> Planner:
    """The planner of a `planner` artifact, in any process: it needs neither Ray nor the data set."""
    facts = artifact.read_json("planner.json")
    words("词")  # the segmenter's dictionary takes half a second to read: now, not at the first query
    # Late: torch stays out of processes that only look words up.
    if facts["config"]["kind"] == "statistics":
        from scalingnote.planner.statistics import WordStatistics

        statistics = validate(Statistics, facts["config"], source=artifact.uri)
        table = artifact.table("words.parquet")
        return Planner(WordStatistics(table, texts=facts["texts"], config=statistics))
    from scalingnote.planner.learned import TermRegressor

    learned = validate(Learned, facts["config"], source=artifact.uri)
    encoder = TermRegressor.load(artifact.directory("encoder"), max_length=learned.max_length)
    return Planner(encoder.score)
