"""The searcher: query embeddings go in, the best documents of an index come out, with their scores.

It may hold all shards of an index, or a few of them: what :meth:`Searcher.find` of several searchers gives
goes through :func:`scalingnote.search.found.merge`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, no_type_check

import faiss
import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.hybrid import Both
from scalingnote.index import filters, ivf, rescore
from scalingnote.index import shard as shards_of
from scalingnote.index.both import candidates as candidates_of_both
from scalingnote.index.compiled import compiled
from scalingnote.index.live.doc_ids import DocIds
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search import hybrid, scan
from scalingnote.search.checks import checked_nprobe, require_both, require_vectors, unit_queries
from scalingnote.search.config import Joining
from scalingnote.search.found import Found
from scalingnote.storage.artifact import open_artifact

DEFAULT_JOINING = Joining()
MASKS = 64  # filters whose rows are remembered: a bool per document each


@dataclass(frozen=True)
class Result:
    """A document found. `score` is the cosine of query and document, as exact as the index keeps vectors."""

    doc_id: str
    score: float
    shard: int
    row: int


@dataclass(frozen=True)
class Candidate:
    """A result before its document is looked up."""

    score: float
    shard: int
    row: int


@dataclass(frozen=True)
class Candidates:
    """The best of each query, best first, as arrays.

    Where a query has fewer candidates than the widest, `score` is -inf and `shard` and `row` are -1.
    """

    score: Float[ndarray, "queries k"]
    shard: Int[ndarray, "queries k"]
    row: Int[ndarray, "queries k"]

    def __len__(self) -> int:
        return len(self.score)

    def __getitem__(self, query: int) -> list[Candidate]:
        """The candidates of one query."""
        found = zip(self.score[query], self.shard[query], self.row[query], strict=True)
        return [Candidate(float(score), int(shard), int(row)) for score, shard, row in found if row >= 0]


class Searcher:
    """Shards of an index, open for search. Threads may share one."""

    def __init__(
        self,
        layout: shards_of.Layout,
        shards: Sequence[shards_of.Shard],
        *,
        nprobe: int | None = None,
        threads: int = 1,
        mapped: bool = False,
    ) -> None:
        """The shards' vectors are merged: they are not to be used by anyone else. Not so where `mapped`."""
        self.layout = layout
        self.nprobe = checked_nprobe(layout.nprobe if nprobe is None else nprobe, layout.nlist)
        ordered = sorted(shards, key=lambda shard: shard.number)
        self._documents = {shard.number: shard.documents for shard in ordered}
        self._rows = {shard.number: shard.stored for shard in ordered}
        self._numbers = np.array([*self._documents])
        self._first = np.array([0, *accumulate(map(len, self._documents.values()))])
        lists = [shard.lists for shard in ordered]
        self._segments = lists if mapped else [ivf.merge(lists)]
        self._starts = np.array([0, *accumulate(map(len, self._segments))])[:-1]
        self._postings = [shard.postings for shard in ordered if shard.postings is not None]
        self._masks = lru_cache(MASKS)(self._mask)
        # faiss would take every core of the machine for each call, however many replicas share it.
        faiss.omp_set_num_threads(threads)

    @classmethod
    def open(
        cls,
        index_uri: str,
        *,
        shards: Sequence[int] | None = None,
        nprobe: int | None = None,
        threads: int = 1,
        mapped: bool = False,
    ) -> "Searcher":
        """Open the shards with these numbers, or all; `nprobe` None takes the index's own.

        `threads` is what faiss may use for searches from the thread that opens; those of other threads go by
        OMP_NUM_THREADS, which Ray sets for its workers. `mapped` leaves the vectors kept in their files: for
        more documents than there is memory for; shards are then scanned one after the other. Raises
        ArtifactError when a file is missing or damaged, SearchError when a shard does not exist.
        """
        index = open_artifact(index_uri, kind="index")
        layout = shards_of.open_layout(index)
        numbers = range(layout.shards) if shards is None else list(shards)
        unknown = [number for number in numbers if number not in range(layout.shards)]
        if unknown:
            raise SearchError(
                f"{index_uri} has no shard {unknown[0]}: its shards are 0 to {layout.shards - 1}"
            )
        coarse = shards_of.open_coarse(index)
        opened = [
            shards_of.open_shard(index, n, layout=layout, coarse=coarse, mapped=mapped) for n in numbers
        ]
        return cls(layout, opened, nprobe=nprobe, threads=threads, mapped=mapped)

    def __len__(self) -> int:
        """Documents in the shards held."""
        return int(self._first[-1])

    @property
    def dim(self) -> int:
        """Dimension of the queries."""
        return self.layout.dim

    @property
    def shards(self) -> list[int]:
        """Numbers of the shards held."""
        return list(self._documents)

    @property
    def fields(self) -> pa.Schema:
        """What a search may filter by."""
        return self.layout.fields(next(iter(self._documents.values())).schema)

    def facets(self, *, most: int) -> dict[str, dict[str, int]]:
        """How many of the documents held have each value, for text fields with at most so many values."""
        return filters.facets(list(self._documents.values()), self.fields, most=most)

    def search(
        self,
        queries: Float[ndarray, "queries dim"],
        *,
        k: int,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
    ) -> list[list[Result]]:
        """The k best documents of each query, best first; all there are where there are fewer.

        Queries need not be of unit length. `where` keeps only the documents that it describes (see
        :mod:`scalingnote.index.filters`). Raises SearchError for queries that cannot be searched.
        """
        return self._named(self.candidates(queries, k=k, nprobe=nprobe, where=where))

    def search_both(
        self,
        queries: Float[ndarray, "queries dim"],
        terms: SparseRows,
        *,
        k: int,
        joining: Joining = DEFAULT_JOINING,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
    ) -> list[list[Result]]:
        """The k best documents by embeddings and by terms; `terms` has a row for each query.

        Every candidate of either side is scored by both. A score is in [0, 1] by interpolation, else a sum of
        reciprocal ranks. SearchError where this index cannot do it.
        """
        depth = max(k, joining.candidates)
        both = self._both(queries, terms, k=k, depth=depth, nprobe=nprobe, where=where)
        best = hybrid.best(both, joining, layout=self.layout, candidates=depth, k=k)
        return self._named(self._located(*best))

    def find(
        self,
        queries: Float[ndarray, "queries dim"],
        *,
        k: int,
        terms: SparseRows | None = None,
        joining: Joining = DEFAULT_JOINING,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
        exact: bool = False,
    ) -> list[Found]:
        """What the shards held have for each query, to be merged with what others have; see :func:`merge`.

        With `terms`, a row for each query, candidates of either kind, scored by both. `exact` compares a
        query with every document, as far as the index keeps vectors: to measure what search misses.
        """
        if terms is None:
            best = self.candidates(queries, k=k, nprobe=nprobe, where=where, exact=exact)
            ids, located, dense, sparse = scan.packed(best.shard, best.row), best, best.score, None
        else:
            depth = max(k, joining.candidates)
            both = self._both(queries, terms, k=k, depth=depth, nprobe=nprobe, where=where, exact=exact)
            located, dense, sparse = self._located(both.dense, both.ids), both.dense, both.sparse
            ids = scan.packed(located.shard, located.row)
        answers = []
        for query, count in enumerate((ids >= 0).sum(axis=1).tolist()):  # there are none behind the last
            places = zip(
                located.shard[query, :count].tolist(), located.row[query, :count].tolist(), strict=True
            )
            answers.append(
                Found(
                    ids[query, :count],
                    located.shard[query, :count],
                    dense[query, :count],
                    None if sparse is None else sparse[query, :count],
                    [self._rows[shard][row] for shard, row in places],
                )
            )
        return answers

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id; None where no shard held has it."""
        row = self._row_of(doc_id)
        return None if row is None else self.documents([row[1]], shard=row[0])[0]

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """A document's vector, as exact as the index keeps it; None where no shard held has it.

        SearchError where the index keeps codes alone.
        """
        row = self._row_of(doc_id)
        if row is None:
            return None
        require_vectors(self.layout)
        over_all = self._first[self.shards.index(row[0])] + row[1]
        piece = int(np.searchsorted(self._starts, over_all, side="right")) - 1
        kept = self._segments[piece].kept
        found: ndarray = rescore.vectors(kept, np.array([over_all - self._starts[piece]]))[0]
        return found

    def candidates(
        self,
        queries: Float[ndarray, "queries dim"],
        *,
        k: int,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
        exact: bool = False,
    ) -> Candidates:
        """The k best of the shards held. Same checks as :meth:`search`."""
        unit = unit_queries(queries, dim=self.dim, k=k)
        plan = self._plan(nprobe, exact=exact)
        found = scan.search(self._segments, unit, k=k, plan=plan, masks=self._masks_of(where))
        return self._located(found.scores, self._over_all(found))

    def _both(
        self,
        queries: Float[ndarray, "queries dim"],
        terms: SparseRows,
        *,
        k: int,
        depth: int,
        nprobe: int | None,
        where: filters.Filter | None,
        exact: bool = False,
    ) -> Both:
        """The `depth` best of either kind, as rows over all that is held, with both scores."""
        require_both(self.layout)
        unit = unit_queries(queries, dim=self.dim, k=k)
        masks = self._masks_of(where)
        plan = self._plan(nprobe, exact=exact)
        found = scan.search(self._segments, unit, k=depth, plan=plan, masks=masks)
        kept = [(int(first), lists.kept) for first, lists in zip(self._starts, self._segments, strict=True)]
        return candidates_of_both(
            self._over_all(found),
            partial(rescore.scores_over, kept, unit),
            self._postings,
            terms,
            k=depth,
            allowed=None if masks is None else np.concatenate(masks),
        )

    def _over_all(self, found: scan.Found) -> Int[ndarray, "queries k"]:
        """Rows found, counted over all that is held."""
        if len(self._segments) == 1:
            return found.rows
        return np.where(found.rows < 0, -1, self._starts[found.segments] + found.rows)

    @cached_property
    def _ids(self) -> dict[int, DocIds]:
        """Of each shard; made for the first document that is asked for by its id."""
        return {number: DocIds(documents["doc_id"]) for number, documents in self._documents.items()}

    def _row_of(self, doc_id: str) -> tuple[int, int] | None:
        """Shard and row of a document."""
        for number, ids in self._ids.items():
            if (row := int(ids.rows([doc_id])[0])) >= 0:
                return number, row
        return None

    def _plan(self, nprobe: int | None, *, exact: bool) -> scan.Plan:
        probes = self.nprobe if nprobe is None else checked_nprobe(nprobe, self.layout.nlist)
        return scan.Plan(probes, self.layout.refine_factor, exact=exact)

    def _masks_of(self, where: filters.Filter | None) -> list[Bool[ndarray, " rows"]] | None:
        """Which rows a checked filter leaves; None without one."""
        if not where:
            return None
        filters.check(where, self.fields)
        return np.split(self._masks(json.dumps(where, sort_keys=True)), self._starts[1:])

    def _located(self, scores: Float[ndarray, "queries k"], rows: Int[ndarray, "queries k"]) -> Candidates:
        """Rows over all that is held, as shards and the rows in them."""
        shard, inside = _places(rows, self._first, self._numbers)
        return Candidates(scores.astype(np.float32, copy=False), shard, inside)

    def _named(self, found: Candidates) -> list[list[Result]]:
        return [
            [
                Result(self._rows[c.shard].value(c.row, "doc_id"), c.score, c.shard, c.row)
                for c in found[query]
            ]
            for query in range(len(found))
        ]

    def _mask(self, where: str) -> Bool[ndarray, " rows"]:
        """Which of the documents held a filter describes."""
        wanted = json.loads(where)
        return np.concatenate([filters.mask(documents, wanted) for documents in self._documents.values()])

    def document(self, result: Result | Candidate) -> dict[str, Any]:
        """doc_id, title, topic, snippet and semantic_id of a result."""
        return self.documents([result.row], shard=result.shard)[0]

    def documents(self, rows: Sequence[int], *, shard: int | None = None) -> list[dict[str, Any]]:
        """The same for rows of a shard, which need not be named when only one is held."""
        if shard is None and len(self._documents) == 1:
            shard = self.shards[0]
        if shard not in self._documents:
            raise SearchError(f"shard {shard} is not held here: this searcher holds {self.shards}")
        table = self._documents[shard]
        outside = [row for row in rows if row not in range(len(table))]
        if outside:
            raise SearchError(f"shard {shard} has no row {outside[0]}: it has {len(table)} documents")
        return [self._rows[shard][row] for row in rows]


@compiled
@no_type_check
def _places(rows, first, numbers):
    """The shard of each row, and its row there; -1 for none. `first` is where shards begin, and the end."""
    shard, inside = np.full_like(rows, -1), np.full_like(rows, -1)
    for q in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            row = rows[q, c]
            if row >= 0:
                place = np.searchsorted(first, row, side="right") - 1
                shard[q, c], inside[q, c] = numbers[place], row - first[place]
    return shard, inside
