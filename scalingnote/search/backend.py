"""Search backends of a service: a :class:`Searcher` over an index, or a vector database with its documents.

    queries ─► the database: best by vectors, best by terms ─► missing scores, by id ─► Candidates

`scalingnote export vectors` has filled the database. The searcher reads the ids, the filter columns and the
documents of the answers from the index, never its vectors. Candidates name a shard and a row like those of
the index, so the same code ranks and shows them. Documents that the index does not have are left out.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core.errors import ArtifactError, ConfigError, DatabaseError, ScalingNoteError, SearchError
from scalingnote.index import filters, hybrid
from scalingnote.index import shard as shards_of
from scalingnote.index.config import SearchConfig
from scalingnote.index.shard import DocumentRows, DocumentStore
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search import collection as collections
from scalingnote.search.collection import Collection, Conditions, Hits, PointPart, Terms
from scalingnote.search.scan import unit_queries
from scalingnote.search.searcher import (
    Candidates,
    Searcher,
    candidate_ids,
    candidate_places,
    first_passages,
)
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.storage.schema import INDEXED_VIEW

T = TypeVar("T")
SAMPLED = 8  # documents that are compared with those of the collection at the start
TOLERANCE = 1e-4  # of their vectors: a database may normalize them by another order of operations
# The candidates of a query: ids of documents, dense scores, and scores by terms (empty without terms).
_Scored: TypeAlias = tuple[list[str], list[float], list[float]]


class DatabaseSearcher:
    """Search of all documents of an index version in a vector database, by one thread at a time.

    Args:
        index: the artifact with layout, ids, filter columns and documents.
        collection: the collection of the database, see :mod:`scalingnote.search.collection`.
        name: name of the database, for messages.
    """

    version = ""

    def __init__(self, index: Artifact, collection: Collection, *, name: str) -> None:
        self._index, self._collection, self._name = index, collection, name
        self.layout = shards_of.open_layout(index)
        self.shards = list(range(self.layout.shards))
        self._columns = [shards_of.open_columns(index, n) for n in self.shards]
        self._rows = [
            DocumentRows(table, shards_of.open_ids(index, n, rows=len(table)))
            for n, table in enumerate(self._columns)
        ]

    @classmethod
    def open(
        cls, index_uri: str, search: SearchConfig, *, collection: str, timeout_s: float
    ) -> "DatabaseSearcher":
        """Open an index version and the collection of its documents, and compare the two.

        Raises:
            ArtifactError: a file of the index is missing or damaged.
            ConfigError: the database does not answer, or the collection does not hold the documents of the
                index.
        """
        index = open_artifact(index_uri, kind="index")
        database = collections.connect(search, collection, timeout_s=timeout_s)
        searcher = cls(index, database, name=search.backend)
        try:
            searcher._require_documents(collection, str(search.url))
        except BaseException:
            database.close()
            raise
        return searcher

    def __len__(self) -> int:
        """Number of documents."""
        return self.layout.documents

    @property
    def dim(self) -> int:
        """Dimension of the queries."""
        return self.layout.dim

    @property
    def fields(self) -> pa.Schema:
        """Columns that a search may filter by."""
        return self.layout.fields(self._columns[0].schema)

    def documents(self) -> list[pa.Table]:
        """See :meth:`Searcher.documents`."""
        return first_passages(self._columns) if self.layout.passages else self._columns

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """Return the document with this id, from the index."""
        return self.store.get(doc_id)

    def columns(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return id and filter columns of each candidate, from the index."""
        places = zip(ids, candidate_places(ids), strict=True)
        return {each: self._rows[shard][row] for each, (shard, row) in places}

    @cached_property
    def store(self) -> DocumentStore:
        """Documents of the index, opened for the first answer that this process shows."""
        return DocumentStore.open(self._index)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """Return a document's vector, from the database; None if it or the index lacks the document."""
        _, rows = self._places([doc_id])
        stored_vector = self._read([doc_id], "dense").get(doc_id) if rows[0] >= 0 else None
        return (
            None if stored_vector is None else arrow.l2_normalize(np.asarray([stored_vector], np.float32))[0]
        )

    def answers(self) -> None:
        """Raise DatabaseError unless the database answers."""
        self._ask(self._collection.count)

    def close(self) -> None:
        """Close the connection to the database."""
        self._collection.close()

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
        """Find candidates like :meth:`Searcher.find`; `exact` holds as far as the database allows.

        Raises:
            SearchError: the arguments are invalid for this index, or `nprobe` is given.
            DatabaseError: the database fails.
        """
        if terms is not None and not self.layout.sparse:
            raise SearchError("this index has no terms: set bm25, or train with train.sparse")
        if nprobe is not None:
            raise SearchError(f"nprobe is an option of index files: set search.ef for {self._name}")
        unit = unit_queries(queries, dim=self.dim, k=k, passages=self.layout.passages)
        filters.check(where or {}, self.fields)
        conditions = filters.conditions(where or {}, self.fields)
        if not len(unit) or any(condition == [] for condition in conditions.values()):
            return self._candidates([([], [], [])] * len(unit), hybrid=terms is not None)
        depth = k if terms is None else max(k, hybrid.CANDIDATES_PER_SCORE)
        by_vectors = self._dense(unit, depth, conditions, exact=exact)
        if terms is None:
            return self._candidates([(*hits, []) for hits in by_vectors], hybrid=False)
        rows = _rows(terms)
        by_terms = self._sparse(rows, depth, conditions)
        return self._candidates(self._hybrid(unit, rows, by_vectors, by_terms), hybrid=True)

    # --- parts of a search ----------------------------------------------------------------------------

    def _dense(
        self, unit: Float[ndarray, "queries dim"], depth: int, where: Conditions, *, exact: bool
    ) -> list[Hits]:
        """Find the best by vectors; search again if the graph finds too few because of a filter."""
        answers = self._ask(self._collection.dense, unit, k=depth, where=where, thorough=exact)
        expected = min(depth, len(self))
        short = [n for n, (ids, _) in enumerate(answers) if len(ids) < expected and not exact]
        if short:
            again = self._ask(self._collection.dense, unit[short], k=depth, where=where, thorough=True)
            for n, hits in zip(short, again, strict=True):
                answers[n] = max(answers[n], hits, key=lambda each: len(each[0]))
        return answers

    def _sparse(self, rows: Sequence[Terms], depth: int, where: Conditions) -> list[Hits]:
        """Find the best by terms; a query without terms has no hits."""
        with_terms = [n for n, row in enumerate(rows) if row]
        hits_of_queries: list[Hits] = [([], [])] * len(rows)
        if with_terms:
            queries = [rows[n] for n in with_terms]
            answers = self._ask(self._collection.sparse, queries, k=depth, where=where)
            for n, hits in zip(with_terms, answers, strict=True):
                hits_of_queries[n] = hits
        return hits_of_queries

    def _hybrid(
        self,
        unit: Float[ndarray, "queries dim"],
        rows: Sequence[Terms],
        by_vectors: Sequence[Hits],
        by_terms: Sequence[Hits],
    ) -> list[_Scored]:
        """Score all candidates both ways, those that one search missed by their stored vector or terms."""
        dense = [dict(zip(*hits, strict=True)) for hits in by_vectors]
        sparse = [dict(zip(*hits, strict=True)) for hits in by_terms]
        pairs = [*zip(dense, sparse, strict=True)]
        vectors = self._read(sorted({i for d, s in pairs for i in s.keys() - d.keys()}), "dense")
        unscored = {i for row, (d, s) in zip(rows, pairs, strict=True) if row for i in d.keys() - s.keys()}
        known = self._read(sorted(unscored), "terms")
        candidates = []
        for query, row, (by_vector, by_term) in zip(unit, rows, pairs, strict=True):
            by_vector |= {
                i: float(query @ np.asarray(vectors[i], np.float32))
                for i in by_term.keys() - by_vector.keys()
                if i in vectors
            }
            ids = [*by_vector]
            terms = [
                by_term[i] if i in by_term else _product(row, known.get(i, {})) if row else 0.0 for i in ids
            ]
            candidates.append((ids, [by_vector[i] for i in ids], terms))
        return candidates

    def _candidates(self, hits: Sequence[_Scored], *, hybrid: bool) -> list[Candidates]:
        """Convert hits to candidates, without documents that the index does not have."""
        answers = []
        for doc_ids, dense, sparse in hits:
            shards, rows = self._places(doc_ids)
            known = rows >= 0
            candidates = Candidates(
                candidate_ids(shards, rows)[known],
                shards[known],
                np.asarray(dense, np.float32)[known],
                np.asarray(sparse, np.float32)[known] if hybrid else None,
                (),
                searched=len(self.shards),
                version=self.version,
            )
            answers.append(candidates)
        return answers

    def _places(self, doc_ids: Sequence[str]) -> tuple[Int[ndarray, " ids"], Int[ndarray, " ids"]]:
        """Return the shard and the row in it of each document; the row is -1 if the index lacks it."""
        shards, rows = np.zeros(len(doc_ids), np.int64), np.full(len(doc_ids), -1, np.int64)
        for shard, documents in enumerate(self._rows):
            rows_here = documents.find(doc_ids)
            shards[rows_here >= 0], rows[rows_here >= 0] = shard, rows_here[rows_here >= 0]
        return shards, rows

    def _read(self, doc_ids: Sequence[str], part: PointPart) -> dict[str, Any]:
        """Read one part of the points of documents; without ids, do not call the database."""
        return self._ask(self._collection.read, doc_ids, part) if doc_ids else {}

    def _ask(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call the database; raise DatabaseError for any error of its client, as each client has its own."""
        try:
            return call(*args, **options)
        except ScalingNoteError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise DatabaseError(f"{self._name} failed: {reason}") from error

    # --- the collection at the start --------------------------------------------------------------------

    def _require_documents(self, collection: str, url: str) -> None:
        """Raise ConfigError unless the collection holds the documents of the index: compare a sample."""
        layout, place = self.layout, f"collection {collection!r} of {self._name} at {url}"
        remedy = (
            f"load it with `scalingnote export vectors --run RUN --to {self._name} --url {url} "
            f"--collection {collection}`"
        )
        shape = self._ask(self._collection.layout)
        if shape is None:
            raise ConfigError(f"there is no {place}: {remedy}")
        if shape[0] != layout.dim or shape[1] < layout.sparse:
            actual = f"{shape[0] or 'no'} dimensions{'' if shape[1] else ' and no terms'}"
            expected = f"{layout.dim}{' and terms' if layout.sparse else ''}"
            raise ConfigError(f"{place} has {actual}, the index {expected}: {remedy}")
        if (count := self._ask(self._collection.count)) != layout.documents:
            raise ConfigError(f"{place} holds {count:,} documents, the index {layout.documents:,}: {remedy}")
        ids, vectors = self._sample()
        vectors_there, columns = self._read(ids, "dense"), self._read(ids, "columns")
        for doc_id, vector in zip(ids, vectors, strict=True):
            if doc_id not in vectors_there:
                raise ConfigError(f"{place} does not hold {doc_id!r} of the index: {remedy}")
            if vector is not None and not np.allclose(vectors_there[doc_id], vector, atol=TOLERANCE):
                raise ConfigError(f"{place} has another vector of {doc_id!r} than the index: {remedy}")
        for doc_id, shard, row in zip(ids, *self._places(ids), strict=True):
            for name in self.layout.filters if row >= 0 else ():
                if name not in columns[doc_id] and self._rows[shard][int(row)][name] is not None:
                    raise ConfigError(
                        f"{place} lacks the column {name!r}, which the index filters by: {remedy}"
                    )

    def _sample(self) -> tuple[list[str], list[Any]]:
        """Return ids of some documents, and their vectors, which are None if the embeddings are deleted."""
        embeddings = self._index.manifest.parents.get("embeddings")
        if embeddings is not None:
            with suppress(ArtifactError, OSError):
                source = open_artifact(embeddings["uri"], kind="embeddings")
                counts = source.rows_of(source.table_parts("embeddings"))
                table = source.table(max(counts, key=lambda name: counts[name]), ["doc_id", INDEXED_VIEW])
                rows = np.unique(np.linspace(0, len(table) - 1, SAMPLED).astype(np.int64))
                table = table.take(pa.array(rows))
                return table["doc_id"].to_pylist(), [*arrow.to_numpy(table[INDEXED_VIEW])]
        ids = max(self._columns, key=len)["doc_id"].slice(0, SAMPLED).to_pylist()
        return ids, [None] * len(ids)


SearchBackend: TypeAlias = Searcher | DatabaseSearcher


def _rows(terms: SparseRows) -> list[dict[int, float]]:
    numbers, weights, bounds = terms.terms.tolist(), terms.values.tolist(), terms.offsets.tolist()
    return [
        {term: weight for term, weight in zip(numbers[a:b], weights[a:b], strict=True) if weight}
        for a, b in pairwise(bounds)
    ]


def _product(query: Terms, document: Terms) -> float:
    return sum((weight * document[term] for term, weight in query.items() if term in document), 0.0)
