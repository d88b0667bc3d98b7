"""Searchers: the best documents of an index for query embeddings, or for embeddings and terms together.

    queries ─► rows of its shards ─scan─► Candidates ─rank─► Results, best first

A searcher holds all shards of an index or some of them. :meth:`Searcher.find` returns the candidates of its
shards, and :func:`rank` ranks those of one or several searchers. :class:`Searcher` opens a built index;
:mod:`scalingnote.search.live_searcher` has the searchers of an index that takes writes.

In an index of passages, each document is shown once, at the place of its best passage, which is its snippet:

    k documents ─► the best passages, a few per document ─► one per document ─► k of them? else more passages

Passages are searched and ranked like documents; then the beginning of their ranking is grouped by document.
So the k documents are exactly the first k of the complete ranking of passages: a document that is missing has
no passage among those read, and all of these are better than its passages. There are fewer than k documents
only if the ranking ends, or at MAX_DEPTH. A hybrid ranking takes at least `depth` candidates of either kind,
as in an index of documents.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.core.errors import SearchError
from scalingnote.index import filters, hybrid, ivf
from scalingnote.index import shard as shards_of
from scalingnote.index.hybrid import HybridCandidates
from scalingnote.index.shard import DocumentStore, IndexLayout, Shard
from scalingnote.index.sparse import hybrid_candidates
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search import scan
from scalingnote.search.scan import (
    MAX_DEPTH,
    IndexView,
    checked_nprobe,
    require_hybrid,
    require_vectors,
    unit_queries,
)
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.storage.schema import PASSAGE, document_of, passage_id

S = TypeVar("S", bound="Searcher")
FIRST_DEPTH = 4  # passages per requested document in the first search
DEEPER = 4  # factor by which each further search takes more
_ROW_BITS = 40  # lower bits of a candidate's id, for the row; the bits above are the number of its shard
_ROWS = (1 << _ROW_BITS) - 1


class SearchHit(NamedTuple):
    """A document of the answer. `score` is `dense`, or the joined dense and sparse score.

    `dense` is the cosine of query and document; in an index that compares by dot, the inner product of the
    query at length 1 and the document, which gives the same order as the similarity of the model.
    """

    score: float
    document: Mapping[str, Any]
    shard: int
    dense: float
    sparse: float | None

    @property
    def doc_id(self) -> str:
        """Id of the document."""
        return str(self.document["doc_id"])


@dataclass(frozen=True)
class Candidates:
    """Candidates of some shards for one query, in any order.

    Candidates of a live index contain their documents, because the index may change before they are read.
    `ids` order documents of equal scores in the same way in every process.
    """

    ids: Int[ndarray, " candidates"]
    shards: Int[ndarray, " candidates"]
    dense: Float[ndarray, " candidates"]
    sparse: Float[ndarray, " candidates"] | None  # None if the query has no terms
    documents: Sequence[Any]  # mappings; None, or empty: not read yet
    searched: int  # number of shards
    version: str = ""  # of the index, if it is served
    missing: tuple[int, ...] = ()  # numbers of the groups of shards that did not answer

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, places: Sequence[int]) -> "Candidates":
        """Return the candidates at these places."""
        rows = np.asarray(places, np.int64)
        return replace(
            self,
            ids=self.ids[rows],
            shards=self.shards[rows],
            dense=self.dense[rows],
            sparse=None if self.sparse is None else self.sparse[rows],
            documents=[self.documents[place] for place in places] if self.documents else (),
        )


@dataclass(frozen=True)
class Results:
    """The best candidates of all shards, best first, with their scores.

    Their documents are read last, by :func:`with_documents`.
    """

    best: Candidates
    scores: Sequence[float]
    documents: Sequence[Any]  # mappings; None, or empty: not read yet

    def __len__(self) -> int:
        return len(self.best)

    @property
    def is_read(self) -> bool:
        """Whether every result has its document."""
        return len(self.documents) == len(self) and not any(row is None for row in self.documents)

    def take(self, places: Sequence[int]) -> "Results":
        """Return the results at these places."""
        documents = [self.documents[place] for place in places] if self.documents else ()
        return Results(self.best.take(places), [self.scores[place] for place in places], documents)

    def with_documents(self, documents: Sequence[Mapping[str, Any]]) -> "Results":
        """Return the same results with their documents."""
        return Results(self.best, self.scores, documents)

    def hits(self) -> list[SearchHit]:
        """Return a list with one hit per result."""
        best = self.best
        sparse = [None] * len(self) if best.sparse is None else best.sparse.tolist()
        columns = (self.scores, self.documents, best.shards.tolist(), best.dense.tolist(), sparse)
        return [SearchHit(*row) for row in zip(*columns, strict=True)]


def candidate_ids(shards: Int[ndarray, "*n"], rows: Int[ndarray, "*n"]) -> Int[ndarray, "*n"]:
    """Compute the id of each candidate, which holds its shard and its row there in one number."""
    ids: ndarray = (shards << _ROW_BITS) + rows
    return ids


def candidate_places(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return shard and row of each candidate, from its id."""
    return [(each >> _ROW_BITS, each & _ROWS) for each in ids]


def with_documents(results: Results, store: DocumentStore) -> Results:
    """Add missing documents to results, from the store of the same version of the index."""
    if results.is_read:
        return results
    documents = results.documents or [None] * len(results)
    places = candidate_places(results.best.ids.tolist())
    return results.with_documents(
        [
            store.read(*place) if document is None else document
            for document, place in zip(documents, places, strict=True)
        ]
    )


def rank(
    candidates: Candidates, *, k: int, layout: IndexLayout, dense_weight: float | None = None
) -> Results:
    """Rank the candidates of all shards for one query.

    The result does not depend on how shards are distributed over searchers: of hybrid candidates, only the
    number per score that a single searcher would have returned is considered.

    Args:
        candidates: from :meth:`Searcher.find`; those of several searchers from :func:`concatenate`.
        k: number of documents.
        layout: layout of the index.
        dense_weight: weight of dense scores, in [0, 1]; sparse scores have the rest. None: the tuned
            weight of the index, else UNTUNED_WEIGHT.

    Returns:
        At most k results; if scores are equal, the lower id is first.
    """
    ids = candidates.ids.tolist()
    if candidates.sparse is None:
        # Every search runs this: for a few dozen candidates, Python is ten times as fast as numpy.
        columns = zip((-candidates.dense).tolist(), ids, range(len(ids)), strict=True)
        nearest = sorted(columns)[:k]
        scores, order = [-negative for negative, _, _ in nearest], [place for _, _, place in nearest]
        # The candidates of a single searcher are in this order already.
        best = candidates if order == [*range(len(ids))] else candidates.take(order)
        return Results(best, scores, best.documents)
    depth = max(k, hybrid.CANDIDATES_PER_SCORE)
    both = HybridCandidates(candidates.ids[None], candidates.dense[None], candidates.sparse[None])
    if len(ids) > depth:  # from several searchers, each with up to `depth` by either score
        both = hybrid.merge([both], candidates=depth)
    weights = (dense_weight, layout.dense_weight, hybrid.UNTUNED_WEIGHT)
    weight = next(weight for weight in weights if weight is not None)
    (joined,), (best,) = hybrid.by_score(
        both, dense_weight=weight, background=layout.background or 0.0, depth=k
    )
    places = {number: place for place, number in enumerate(ids)}
    ranked = candidates.take([places[number] for number in best[best >= 0].tolist()])
    return Results(ranked, joined[best >= 0].tolist(), ranked.documents)


def concatenate(answers: Sequence[Candidates], *, missing: Sequence[int] = ()) -> Candidates:
    """Concatenate candidates of any number of searchers, with disjoint shards.

    There are no sparse scores if one of the searchers has none. `missing` are further groups of shards, which
    did not answer.
    """
    missing = tuple(sorted([*missing, *(group for answer in answers for group in answer.missing)]))
    if len(answers) == 1:
        return answers[0] if answers[0].missing == missing else replace(answers[0], missing=missing)
    if not answers:
        nothing = np.empty(0, np.int64)
        return Candidates(nothing, nothing, nothing.astype(np.float32), None, (), 0, missing=missing)
    # An aggregator has no candidates, and so no scores of either kind, if all its groups were late.
    with_scores = [answer for answer in answers if len(answer)]
    sparse = [answer.sparse for answer in with_scores if answer.sparse is not None]
    unread = [None] if any(answer.documents for answer in answers) else []
    return Candidates(
        ids=np.concatenate([answer.ids for answer in answers]),
        shards=np.concatenate([answer.shards for answer in answers]),
        dense=np.concatenate([answer.dense for answer in answers]),
        sparse=np.concatenate(sparse) if sparse and len(sparse) == len(with_scores) else None,
        documents=[row for answer in answers for row in answer.documents or unread * len(answer)],
        searched=sum(answer.searched for answer in answers),
        version=answers[-1].version,
        missing=missing,
    )


# --- passages ---------------------------------------------------------------------------------------------


def first_depth(k: int, layout: IndexLayout) -> int:
    """Return the number of rows of the first search for k documents: k, or several passages for each."""
    return min(FIRST_DEPTH * k, MAX_DEPTH) if layout.passages else k


def next_depth(documents: Results, passages: int, *, k: int, depth: int) -> int | None:
    """Return the number of passages to search next; None if k documents are found, or more cannot be.

    Args:
        documents: results of :func:`best_per_document`.
        passages: number of passages that the last search found.
        k: number of requested documents.
        depth: number of passages that the last search requested.
    """
    if len(documents) >= k or passages < depth or depth >= MAX_DEPTH:
        return None
    return min(DEEPER * depth, MAX_DEPTH)


def best_per_document(results: Results) -> Results:
    """Convert results with passages to results with documents, in the order of their best passages."""
    first: dict[str, int] = {}
    for place, row in enumerate(results.documents):
        first.setdefault(document_of(row["doc_id"]), place)
    best = results.take([*first.values()])
    return best.with_documents([as_document(row) for row in best.documents])


def first_passages(tables: Iterable[pa.Table]) -> list[pa.Table]:
    """Select the row of each document's first passage, which every document has, to count documents."""
    return [table.filter(pc.ends_with(table["doc_id"], passage_id("", 1))) for table in tables]


def as_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the stored row of a passage to its document, with the passage's place if the row has it."""
    document = {name: value for name, value in row.items() if name not in PASSAGE.names}
    document["doc_id"] = document_of(row["doc_id"])
    if "passage" in row:
        document["passage"] = {"number": row["passage"], "start": row["start"], "end": row["end"]}
    return document


# --- searchers --------------------------------------------------------------------------------------------


class Searcher:
    """Search of some shards of a built index, over its current :class:`IndexView`. Threads may share one."""

    version = ""  # of the index; its candidates have it too

    def __init__(
        self,
        layout: IndexLayout,
        shards: Sequence[Shard],
        *,
        mapped: bool = False,
        index: Artifact | None = None,
    ) -> None:
        """Make a searcher of shards, with their vectors merged in place unless `mapped`.

        `index` has the documents that answers show; if it is None, the shards have them.
        """
        self._artifact, self._shards = index, {shard.number: shard for shard in shards}
        ordered = sorted(shards, key=lambda shard: shard.number)
        lists = [shard.lists for shard in ordered]
        segments = lists if mapped else [ivf.merge(lists)]
        self._view = IndexView(
            layout,
            segments=segments,
            alive=[None] * len(segments),
            documents=[shard.documents for shard in ordered],
            postings=[shard.postings for shard in ordered if shard.postings is not None],
            shard_rows={shard.number: len(shard.documents) for shard in ordered},
        )
        # Otherwise faiss uses all cores of the machine for each call, even if many replicas share it. This
        # sets the calling thread; others follow OMP_NUM_THREADS, which Ray sets for its workers.
        faiss.omp_set_num_threads(1)

    @classmethod
    def open(cls: type[S], index_uri: str, *, shards: Sequence[int] | None = None, mapped: bool = False) -> S:
        """Open an index artifact.

        Args:
            index_uri: path or URI of the artifact.
            shards: numbers of the shards to hold; None for all.
            mapped: leave vectors in their files, which the processes of a machine share. Shards are then
                scanned one after the other. See :func:`scalingnote.index.shard.open_shard`.

        Raises:
            ArtifactError: a file is missing or damaged.
            SearchError: there is no such shard.
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
        open_shards = [
            shards_of.open_shard(index, n, layout=layout, coarse=coarse, mapped=mapped, columns_only=True)
            for n in numbers
        ]
        return cls(layout, open_shards, mapped=mapped, index=index)

    def __len__(self) -> int:
        """Return the number of documents in the searcher's shards."""
        return self._view.starts[-1]

    def view(self) -> IndexView:
        """Return the rows of the searcher's shards, always the same."""
        return self._view

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """Return the document with this id; None if no shard of the searcher has it."""
        return self.store.get(doc_id)

    def columns(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return id and filter columns of candidates of a built index, if the searcher has their shards."""
        by_number, places = self._shards, zip(ids, candidate_places(ids), strict=True)
        return {each: by_number[shard].rows[row] for each, (shard, row) in places if shard in by_number}

    def rows_of(self, doc_ids: Sequence[str]) -> Int[ndarray, " rows"]:
        """Find the rows of these documents in the view; in an index of passages, the rows of all passages."""
        pieces = [np.empty(0, np.int64)]
        for first, number in zip(self._view.shard_starts.tolist(), self.shards, strict=False):
            pieces.append(first + self._shards[number].rows.find_all(doc_ids, passages=self.layout.passages))
        return np.concatenate(pieces)

    def hiding(self, alive: Bool[ndarray, " rows"]) -> "Searcher":
        """Return a searcher of the same shards that finds only the rows of the view that are `alive`."""
        other = copy(self)
        other._view = self._view.hiding(alive)
        return other

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """Return the vector of a document, as exact as the index keeps it; None if no shard has the document.

        Raises:
            SearchError: the index keeps only codes.
        """
        for first, number in zip(self._view.shard_starts.tolist(), self.shards, strict=False):
            if (row := int(self._shards[number].rows.find([doc_id])[0])) >= 0:
                require_vectors(self.layout)
                start, vectors = next(piece for piece in reversed(self._view.kept) if piece[0] <= first + row)
                vector: ndarray = ivf.vectors(vectors, np.array([first + row - start]))[0]
                return vector
        return None

    @cached_property
    def store(self) -> DocumentStore:
        """Documents of the searcher's shards, opened for the first answer that this process shows."""
        if self._artifact is None:
            return DocumentStore({n: each.rows for n, each in self._shards.items()}, rows=len(self))
        return DocumentStore.open(self._artifact, sorted(self._shards))

    @property
    def layout(self) -> IndexLayout:
        """Layout of the index version."""
        return self.view().layout

    @property
    def dim(self) -> int:
        """Dimension of the queries."""
        return self.layout.dim

    @property
    def shards(self) -> list[int]:
        """Numbers of the searcher's shards."""
        return [*self.view().shard_rows]

    @property
    def fields(self) -> pa.Schema:
        """Columns that a search may filter by."""
        return self.view().fields

    def documents(self) -> list[pa.Table]:
        """Return a row of filter columns for each document; for a document with passages, the first one's."""
        view = self.view()
        rows = view.alive_documents()
        return first_passages(rows) if view.layout.passages else rows

    def search(
        self,
        queries: Float[ndarray, "queries dim"],
        terms: SparseRows | None = None,
        *,
        k: int,
        dense_weight: float | None = None,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
    ) -> list[list[SearchHit]]:
        """Find the k best documents of each query, by embeddings, or by embeddings and terms.

        In an index of passages, the best passage of a document counts.

        Args:
            queries: embeddings of any length.
            terms: a row for each query. Candidates of either kind then get both scores, interpolated to one
                in [0, 1].
            k: documents per query, 1 to 1000.
            dense_weight: see :func:`rank`.
            nprobe: number of inverted lists to scan; None for the setting of the index.
            where: filter of documents, see :mod:`scalingnote.index.filters`.

        Returns:
            Hits of each query, best first; fewer than k only if fewer documents match.

        Raises:
            SearchError: queries, terms, k, dense_weight, nprobe or filter are invalid for this index.
        """
        layout = self.layout
        unit_queries(queries, dim=layout.dim, k=k)  # checks k before it becomes a number of passages
        if dense_weight is not None and not 0 <= dense_weight <= 1:
            raise SearchError(f"dense_weight is {dense_weight}: pass a number from 0 to 1")
        answers: list[list[SearchHit]] = [[] for _ in queries]
        waiting, depth = [*range(len(queries))], first_depth(k, layout)
        while waiting:
            numbers, k_passages, waiting = waiting, depth, []
            their_terms = None if terms is None else terms.take(numbers)
            batch = self.find(queries[numbers], their_terms, k=depth, nprobe=nprobe, where=where)
            for number, candidates in zip(numbers, batch, strict=True):
                best = rank(candidates, k=k_passages, layout=layout, dense_weight=dense_weight)
                results = best if best.is_read else with_documents(best, self.store)
                if layout.passages:
                    results = best_per_document(results)
                    deeper = next_depth(results, len(best), k=k, depth=k_passages)
                    if deeper is not None:
                        waiting, depth = [*waiting, number], deeper
                answers[number] = results.hits()[:k]
        return answers

    def find(
        self,
        queries: Float[ndarray, "queries dim"],
        terms: SparseRows | None = None,
        *,
        k: int,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
        exact: bool = False,
    ) -> list[Candidates]:
        """Find candidates of each query in the searcher's shards, for :func:`rank`.

        With `terms` (a row for each query), candidates of both kinds get both scores. `exact` compares a
        query with every document if the index keeps vectors, which measures the recall of the search.
        """
        view = self.view()
        layout = view.layout
        if terms is not None:
            require_hybrid(layout)
        unit = unit_queries(queries, dim=layout.dim, k=k, passages=layout.passages)
        depth = k if terms is None else max(k, hybrid.CANDIDATES_PER_SCORE)
        masks = view.masks(where)
        dense, rows = scan.search(
            view.segments,
            unit,
            k=depth,
            nprobe=checked_nprobe(layout.nprobe if nprobe is None else nprobe, layout.nlist),
            refine_factor=layout.refine_factor,
            exact=exact,
            masks=masks,
            alive=view.alive,
        )
        if terms is None:
            return self._candidates(view, rows, dense, None)
        both = hybrid_candidates(
            rows,
            partial(ivf.scores_over, view.kept, unit),
            view.postings,
            terms,
            k=depth,
            allowed=view.whole_mask(masks),
        )
        return self._candidates(view, both.ids, both.dense, both.sparse)

    def _candidates(
        self,
        view: IndexView,
        rows: Int[ndarray, "queries k"],
        dense: Float[ndarray, "queries k"],
        sparse: Float[ndarray, "queries k"] | None,
    ) -> list[Candidates]:
        """Build the candidates of each query without rows of -1; those of live shards get their documents."""
        shards, inside = view.place(rows)
        ids, dense, lookup = candidate_ids(shards, inside), dense.astype(np.float32, copy=False), view.lookup
        answers = []
        for query, count in enumerate((rows >= 0).sum(axis=1).tolist()):
            of_query = query, slice(count)
            documents: Sequence[Any] = ()
            if lookup:  # of built shards with_documents reads them, last
                places = zip(shards[of_query].tolist(), inside[of_query].tolist(), strict=True)
                documents = [lookup[shard](row) if shard in lookup else None for shard, row in places]
            terms = None if sparse is None else sparse[of_query]
            candidates = Candidates(
                *(ids[of_query], shards[of_query], dense[of_query], terms, documents),
                searched=len(view.shard_rows),
                version=self.version,
            )
            answers.append(candidates)
        return answers
