"""Search of a collection that `scalingnote export vectors` filled, through the client of its database.

    vectors ──► dense  ┐
                       ├─► (ids, scores) of each query, best first
    terms ────► sparse ┘

    ids ──────► read ───► vectors, terms or columns by id

Milvus takes filters as text, Qdrant as objects. In its local mode, the client of Qdrant compares a query with
every vector; Milvus Lite builds a graph (HNSW) of sealed segments, like a server. Methods raise the errors of
the clients.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from jaxtyping import Float
from numpy import ndarray

from scalingnote.export import databases
from scalingnote.export.databases import DENSE, NO_TERM, TERMS
from scalingnote.index.config import SearchConfig
from scalingnote.index.filters import Condition

MOST_EF = 32_768  # the limit of Milvus
Conditions = Mapping[str, Condition]  # of scalingnote.index.filters.conditions
Hits = tuple[list[str], list[float]]  # ids of documents and scores, best first
Terms = Mapping[int, float]  # term -> weight
PointPart = Literal["dense", "terms", "columns"]
_OPEN_FILES: Counter[str] = Counter()  # of Milvus Lite: number of open collections of this process in each


class QdrantCollection(databases.Qdrant):
    """A searchable collection of Qdrant."""

    def __init__(self, search: SearchConfig, collection: str, timeout_s: float) -> None:
        super().__init__(search.url or "", collection, timeout_s)
        self._ef, self._is_local = search.ef, search.is_local

    def dense(
        self, queries: Float[ndarray, "queries dim"], *, k: int, where: Conditions, thorough: bool = False
    ) -> list[Hits]:
        """Find the k documents with the largest inner products; `thorough` compares with every vector."""
        params = None
        if not self._is_local:  # the local mode compares with every vector, and warns about settings
            params = self._models.SearchParams(exact=thorough, hnsw_ef=self._ef)
        return self._query([row.tolist() for row in queries], DENSE, k=k, where=where, params=params)

    def sparse(self, queries: Sequence[Terms], *, k: int, where: Conditions) -> list[Hits]:
        """Find the k documents with the largest inner products of terms above 0; each query has terms."""
        vectors = [self._models.SparseVector(indices=[*row], values=[*row.values()]) for row in queries]
        return self._query(vectors, TERMS, k=k, where=where)

    def read(self, doc_ids: Sequence[str], part: PointPart) -> dict[str, Any]:
        """Read vectors, terms or columns of the documents that the collection has."""
        points = self._client.retrieve(
            self._collection,
            ids=[databases.point_id(doc_id) for doc_id in doc_ids],
            with_payload=True if part == "columns" else ["doc_id"],
            with_vectors=False if part == "columns" else [part],
        )
        if part == "terms":
            vectors = {point.payload["doc_id"]: (point.vector or {}).get(TERMS) for point in points}
            return {
                doc_id: dict(zip(row.indices, row.values, strict=True)) if row else {}
                for doc_id, row in vectors.items()
            }
        return {p.payload["doc_id"]: p.payload if part == "columns" else p.vector[DENSE] for p in points}

    def close(self) -> None:
        """Close the folder of the local mode, or the connections."""
        self._client.close()

    def _query(
        self, queries: Sequence[Any], using: str, *, k: int, where: Conditions, params: Any = None
    ) -> list[Hits]:
        conditions = self._filter(where) if where else None
        requests = [
            self._models.QueryRequest(
                query=query, using=using, filter=conditions, params=params, limit=k, with_payload=["doc_id"]
            )
            for query in queries
        ]
        answers = self._client.query_batch_points(self._collection, requests=requests)
        return [
            ([point.payload["doc_id"] for point in answer.points], [point.score for point in answer.points])
            for answer in answers
        ]

    def _filter(self, where: Conditions) -> Any:
        """Convert conditions to a filter of Qdrant, which has lists only of strings and integers."""
        models, must = self._models, []
        for name, condition in where.items():
            field = partial(models.FieldCondition, key=_key(name))
            if isinstance(condition, tuple):
                must.append(field(range=models.Range(gte=condition[0], lte=condition[1])))
            elif isinstance(condition[0], bool):
                must.append(
                    models.Filter(should=[field(match=models.MatchValue(value=v)) for v in condition])
                )
            elif isinstance(condition[0], float):
                must.append(
                    models.Filter(should=[field(range=models.Range(gte=v, lte=v)) for v in condition])
                )
            else:
                must.append(field(match=models.MatchAny(any=condition)))
        return models.Filter(must=must)


def _key(name: str) -> str:
    """Quote a column's name for a key of a payload, in which a dot separates nested keys."""
    return name if name.replace("_", "a").isalnum() else json.dumps(name, ensure_ascii=False)


class MilvusCollection(databases.Milvus):
    """A searchable collection of Milvus, with the methods of :class:`QdrantCollection`."""

    def __init__(self, search: SearchConfig, collection: str, timeout_s: float) -> None:
        super().__init__(search.url or "", collection, timeout_s)
        self._ef, self._file = search.ef, search.url if search.is_local else None
        if self._file is not None:
            _OPEN_FILES[self._file] += 1

    def layout(self) -> tuple[int | None, bool] | None:
        """Return the layout like :class:`databases.Milvus`, and load the collection if it exists."""
        layout = super().layout()
        if layout is not None:
            self._client.load_collection(self._collection, timeout=self._timeout_s)
        return layout

    def dense(
        self, queries: Float[ndarray, "queries dim"], *, k: int, where: Conditions, thorough: bool = False
    ) -> list[Hits]:
        """Find the nearest by vectors; `thorough` searches the graph as widely as Milvus allows."""
        ef = MOST_EF if thorough else self._ef
        params = {} if ef is None else {"ef": max(ef, k)}
        return self._search([*queries], DENSE, k=k, where=where, params=params)

    def sparse(self, queries: Sequence[Terms], *, k: int, where: Conditions) -> list[Hits]:
        """Find the nearest by terms."""
        return self._search([{**row} for row in queries], TERMS, k=k, where=where, params={})

    def read(self, doc_ids: Sequence[str], part: PointPart) -> dict[str, Any]:
        """Read vectors, terms or columns of documents."""
        # The search by ids of the client does not escape them.
        rows = self._client.query(
            self._collection,
            filter=_expression("doc_id", [*doc_ids]),
            output_fields=["*" if part == "columns" else part],
            timeout=self._timeout_s,
        )
        if part == "terms":
            return {
                row["doc_id"]: {term: weight for term, weight in row[TERMS].items() if term != NO_TERM}
                for row in rows
            }
        return {row["doc_id"]: row if part == "columns" else row[DENSE] for row in rows}

    def close(self) -> None:
        """Close the connection; stop the server of a file with the last collection of the file."""
        self._client.close()
        if self._file is not None:
            _OPEN_FILES[self._file] -= 1
            if _OPEN_FILES[self._file]:
                return
            from milvus_lite.server_manager import server_manager_instance  # type: ignore[import-untyped]

            server_manager_instance.release_server(self._file)

    def _search(
        self, queries: list[Any], field: str, *, k: int, where: Conditions, params: dict[str, Any]
    ) -> list[Hits]:
        answers = self._client.search(
            self._collection,
            data=queries,
            anns_field=field,
            limit=k,
            filter=" and ".join(_expression(name, condition) for name, condition in where.items()),
            search_params={"metric_type": "IP", "params": params},
            timeout=self._timeout_s,
        )
        return [
            ([hit["doc_id"] for hit in hits], [float(hit["distance"]) for hit in hits]) for hits in answers
        ]


def _expression(name: str, condition: Condition) -> str:
    """Convert a condition to an expression of Milvus, with columns of documents as dynamic fields."""
    field = name if name == "doc_id" else f"$meta[{_literal(name)}]"
    if isinstance(condition, tuple):
        return f"({field} >= {condition[0]!r} and {field} <= {condition[1]!r})"
    values = [_literal(value) if isinstance(value, str) else str(value).lower() for value in condition]
    if name == "doc_id":
        return f"{field} in [{', '.join(values)}]"
    # Milvus Lite has no `in` for dynamic fields.
    return f"({' or '.join(f'{field} == {value}' for value in values)})"


def _literal(text: str) -> str:
    """Quote a text as a literal of Milvus' expressions, which have fewer escapes than JSON."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(character, escape)
    return f'"{text}"'


Collection: TypeAlias = QdrantCollection | MilvusCollection


def connect(search: SearchConfig, collection: str, *, timeout_s: float) -> Collection:
    """Open a collection to search it.

    Raises:
        ConfigError: the client is missing, or the database does not answer.
    """
    kind: type[Collection] = QdrantCollection if search.backend == "qdrant" else MilvusCollection
    return databases.call_client(search.backend, search.url, lambda: kind(search, collection, timeout_s))
