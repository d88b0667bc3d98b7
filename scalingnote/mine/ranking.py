"""Rankings of documents for the queries of triplets that a search found."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import pyarrow as pa

from scalingnote.mine.queries import Place, number_queries, rows_between
from scalingnote.mine.refresh import RankedDocuments
from scalingnote.mine.search import Found
from scalingnote.storage import filesystem as fs

Ranked = tuple[Mapping[str, RankedDocuments], list[float | None]]


class SearchedRanking:
    """Ranks by the search of the last round's dual encoder; a batch of results is in memory at a time."""

    def __init__(self, places: Mapping[str, Sequence[Place]], folder: str) -> None:
        """Rank by results in `folder`; `places` are those of each part's pieces, in order."""
        self._places, self._folder = places, folder

    def rank(self, name: str, triplets: pa.Table) -> Ranked:
        """Rankings by query_id for a part, and the score of each row's positive if it was searched."""
        places = self._places[name]
        numbers, query_ids = number_queries(triplets)
        scores = np.full(len(triplets), np.nan)
        starts = [*accumulate((place.queries for place in places), initial=0)]
        for start, place in zip(starts, places, strict=False):
            rows = rows_between(numbers, start, start + place.queries)
            positives = found_in(batch_folder(self._folder, place.batch)).positives
            scores[rows] = positives[place.pair : place.pair + place.pairs]
        rankings = _SearchedRankings(query_ids, places, starts, self._folder)
        return rankings, [None if np.isnan(score) else score for score in scores.tolist()]


class _SearchedRankings(Mapping[str, RankedDocuments]):
    """Rankings of a part's queries, each read when it is asked for."""

    def __init__(
        self, query_ids: pa.Array, places: Sequence[Place], starts: Sequence[int], folder: str
    ) -> None:
        self._number = {query_id: number for number, query_id in enumerate(query_ids.to_pylist())}
        self._places, self._starts, self._folder = places, starts, folder

    def __getitem__(self, query_id: str) -> RankedDocuments:
        number = self._number[query_id]
        piece = bisect_right(self._starts, number) - 1
        place = self._places[piece]
        found = found_in(batch_folder(self._folder, place.batch))
        line = place.query + number - self._starts[piece]
        rows = found.rows[line][found.rows[line] >= 0]
        at = np.searchsorted(found.documents["row"].to_numpy(), rows)
        doc_ids = found.documents["doc_id"].take(pa.array(at)).to_pylist()
        return list(zip(doc_ids, found.scores[line][: len(rows)].tolist(), strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)


@lru_cache(maxsize=1)
def found_in(folder: str) -> Found:
    """The results of a batch; those of the last one asked for stay in memory."""
    return Found.read(folder)


def batch_folder(folder: str, batch: int) -> str:
    """Where the results of a batch are."""
    return fs.join(folder, "merged", f"{batch:05d}")
