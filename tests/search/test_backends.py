"""All search backends find the same documents: files of an index, local mode of Qdrant, Milvus Lite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from in_process import without_ray
from scalingnote.core.config import Config
from scalingnote.core.errors import ConfigError, DatabaseError, SearchError
from scalingnote.export import databases, vectors
from scalingnote.index import filters, hybrid, job
from scalingnote.index.config import FastScan, IndexConfig, SearchConfig
from scalingnote.index.shard import DocumentStore
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.backend import DatabaseSearcher, SearchBackend
from scalingnote.search.collection import MOST_EF, _expression
from scalingnote.search.searcher import Candidates, Results, Searcher, rank, with_documents
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft
from synthetic_corpus import queries, semantic_ids
from synthetic_corpus import vectors as clustered

CLIENTS = {"qdrant": "qdrant_client", "milvus": "pymilvus"}
ENGINES = ("own", *CLIENTS)
PARTS, DIM, TERMS, QUERIES = (110, 130), 16, 60, 12
ROWS = sum(PARTS)
FILTERS = ("topic", "price", "rating", "in stock", "größe")
COLLECTION = "documents"
# All lists are scanned, and all documents are re-ranked by float vectors.
EXACT = IndexConfig(
    shards=3,
    family=FastScan(refine="flat"),
    nlist=4,
    nprobe=4,
    train_documents=200,
    refine_factor=100,
    filters=FILTERS,
)
Found = list[tuple[str, float]]  # ids and scores of an answer, best first


def doc_id(row: int) -> str:
    """Return usual ids, and ids with characters that a language of filters must escape."""
    return (f"d{row}", f"https://é.example/{row}?q=1&r='2'", f'"{row}" \\ 文書\t{row}')[row % 3]


@dataclass(frozen=True)
class Corpus:
    """Documents with vectors, terms and columns, and an exact index over them."""

    dense: np.ndarray  # [documents, DIM]
    sparse: np.ndarray  # [documents, TERMS]
    columns: dict[str, list[Any]]
    probes: np.ndarray  # [queries, DIM]
    weights: np.ndarray  # [queries, TERMS], the last query has none
    artifacts: dict[str, Artifact]
    index: str

    def terms(self, chosen: Sequence[int] = range(QUERIES)) -> SparseRows:
        rows = self.weights[[*chosen]]
        at = rows.nonzero()
        offsets = np.concatenate([[0], np.cumsum((rows != 0).sum(1))])
        return SparseRows(offsets, at[1].astype(np.int32), rows[at].astype(np.float32))

    def best(self, scores: np.ndarray, k: int, *, keep: np.ndarray | None = None) -> list[Found]:
        """Find the k documents with the largest scores by brute force."""
        rows = np.arange(ROWS) if keep is None else np.flatnonzero(keep)
        order = [rows[np.argsort(-line[rows], kind="stable")[:k]].tolist() for line in scores]
        return [
            [(doc_id(row), float(line[row])) for row in best_rows]
            for line, best_rows in zip(scores, order, strict=True)
        ]


def columns_of(rows: Sequence[int]) -> dict[str, list[Any]]:
    return {
        "topic": [f"topic {row % 5}" if row % 5 else 'qu"ote \\ 文' for row in rows],
        "price": [None if row % 10 == 0 else row for row in rows],
        "rating": [None if row % 7 == 0 else row / 4 for row in rows],
        "in stock": [None if row % 9 == 0 else row % 2 == 0 for row in rows],
        "größe": [f"{row % 3}" for row in rows],
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    dense = clustered(ROWS, DIM)
    chance = rng.random((ROWS, TERMS)) < 0.1
    sparse = np.where(chance, rng.uniform(0.1, 3, (ROWS, TERMS)), 0).astype(np.float16)
    sparse[::20] = 0  # documents without terms
    weights = np.where(rng.random((QUERIES, TERMS)) < 0.08, rng.uniform(0.5, 2, (QUERIES, TERMS)), 0)
    weights[-1] = 0
    types = [pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.string()]
    dataset = Draft(f"{root}/dataset", kind="dataset", config=Config(), parents={})
    embedded = []
    for part, rows in enumerate(np.split(np.arange(ROWS), [PARTS[0]])):
        names, columns = [doc_id(row) for row in rows], columns_of(rows.tolist())
        text = [
            names,
            [f"Title {row}" for row in rows],
            columns["topic"],
            [f"Text {row}." for row in rows],
            names,
        ]
        table = pa.table(dict(zip(schema.DOCUMENTS.names, text, strict=True)), schema=schema.DOCUMENTS)
        for name, kind in zip(FILTERS[1:], types[1:], strict=True):
            table = table.append_column(name, pa.array(columns[name], kind))
        dataset.write_table(f"documents/part-{part:05d}.parquet", table)
        lists = [np.flatnonzero(line) for line in sparse[rows]]
        impacts = [line[at] for line, at in zip(sparse[rows], lists, strict=True)]
        table = pa.table({"doc_id": names, "summary": arrow.to_arrow(dense[rows])})
        for field, values in zip(schema.SPARSE, (lists, impacts), strict=True):
            table = table.append_column(field, pa.array(values, field.type))
        embedded.append(table)
    documents = dataset.commit(counts={"documents": ROWS})
    draft = Draft(f"{root}/embeddings", kind="embeddings", config=Config(), parents={"dataset": documents})
    for part, table in enumerate(embedded):
        draft.write_table(f"embeddings/part-{part:05d}.parquet", table)
    embeddings = draft.commit(counts={"documents": ROWS})
    artifacts = {"dataset": documents, "embeddings": embeddings}
    artifacts["semantic_ids"] = semantic_ids(f"{root}/semantic_ids", embeddings, numbered=True)
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        index = job.run(EXACT, **{name: each.uri for name, each in artifacts.items()}, output=f"{root}/index")
    probes = queries(dense, QUERIES)
    return Corpus(
        dense, sparse.astype(np.float32), columns_of(range(ROWS)), probes, weights, artifacts, index.uri
    )


def loaded(backend: str, corpus: Corpus, folder: Path, *, columns: Sequence[str] = FILTERS) -> SearchConfig:
    """Load the documents of the corpus into a database."""
    url = str(folder / ("qdrant" if backend == "qdrant" else "milvus.db"))
    source = vectors.ExportSource(
        corpus.artifacts["embeddings"], corpus.artifacts["dataset"], None, tuple(columns)
    )
    database = databases.connect(backend, url, COLLECTION)
    vectors.export(source, database, checkpoint=str(folder / "checkpoint.json"))
    database._client.close()
    ef = MOST_EF if backend == "milvus" else None  # searches the entire graph
    return SearchConfig(backend=backend, url=url, collection=COLLECTION, ef=ef)


def opened(corpus: Corpus, search: SearchConfig) -> DatabaseSearcher:
    return DatabaseSearcher.open(corpus.index, search, collection=search.collection, timeout_s=30.0)


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SearchBackend]:
    if request.param == "own":
        yield Searcher.open(corpus.index)
        return
    pytest.importorskip(CLIENTS[request.param])
    searcher = opened(corpus, loaded(request.param, corpus, tmp_path_factory.mktemp(request.param)))
    yield searcher
    searcher.close()


def search(
    engine: SearchBackend,
    probes: np.ndarray,
    terms: SparseRows | None = None,
    dense_weight: float | None = None,
    **how: Any,
) -> list[Found]:
    """Return ranked candidates with their documents, like a service."""
    store, answers = engine.store, []
    for candidates in engine.find(probes, terms, **how):
        best = rank(candidates, k=how["k"], layout=engine.layout, dense_weight=dense_weight)
        hits = with_documents(best, store).hits()
        assert all(hit.document["title"].startswith("Title ") for hit in hits)
        answers.append([(hit.doc_id, hit.score) for hit in hits])
    return answers


def documents_of(candidates: Candidates, store: DocumentStore) -> Sequence[Any]:
    return with_documents(
        Results(candidates, candidates.dense.tolist(), candidates.documents), store
    ).documents


def ids(answers: list[Found]) -> list[list[str]]:
    return [[name for name, _ in answer] for answer in answers]


def test_dense_search_equals_brute_force(engine: SearchBackend, corpus: Corpus) -> None:
    answers = search(engine, 3 * corpus.probes, k=10)  # the length of a query does not matter
    best = corpus.best(corpus.probes @ corpus.dense.T, 10)
    assert ids(answers) == ids(best)
    np.testing.assert_allclose(
        [[s for _, s in f] for f in answers], [[s for _, s in b] for b in best], atol=1e-5
    )


def test_hybrid_scores_equal_those_of_the_index_files(
    engine: SearchBackend, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Searcher.open(corpus.index)
    monkeypatch.setattr(hybrid, "CANDIDATES_PER_SCORE", 40)
    actual, expected = (
        search(each, corpus.probes, corpus.terms(), k=10, dense_weight=0.3) for each in (engine, index)
    )
    shared = [len({*a} & {*b}) / 10 for a, b in zip(ids(actual), ids(expected), strict=True)]
    assert np.mean(shared) >= 0.99
    scores = ([[score for _, score in answer] for answer in answers] for answers in (actual, expected))
    np.testing.assert_allclose(*scores, atol=1e-3)
    (candidates,) = engine.find(corpus.probes[:1], corpus.terms([0]), k=10)
    assert candidates.sparse is not None
    rows = {doc_id(row): row for row in range(ROWS)}
    store = Searcher.open(corpus.index).store
    for hit, dense, sparse in zip(
        documents_of(candidates, store), candidates.dense, candidates.sparse, strict=True
    ):
        row = rows[hit["doc_id"]]
        assert dense == pytest.approx(corpus.dense[row] @ corpus.probes[0], abs=1e-5)
        assert sparse == pytest.approx(corpus.sparse[row] @ corpus.weights[0], abs=1e-3)


@pytest.mark.parametrize(
    ("where", "matches"),
    [
        ({"topic": 'qu"ote \\ 文'}, lambda row: row["topic"].startswith("qu")),
        ({"topic": ["topic 1", "topic 4", "none"]}, lambda row: row["topic"] in ("topic 1", "topic 4")),
        ({"größe": "2"}, lambda row: row["größe"] == "2"),
        ({"price": 17}, lambda row: row["price"] == 17),
        ({"price": [3, 4.0, 200, 7.5]}, lambda row: row["price"] in (3, 4)),
        ({"price": {"min": 20.5, "max": 90}}, lambda row: row["price"] and 21 <= row["price"] <= 90),
        ({"price": {"min": -1e30}}, lambda row: row["price"] is not None),
        ({"rating": [2.5, 3]}, lambda row: row["rating"] in (2.5, 3)),
        ({"rating": {"max": 11.25}}, lambda row: row["rating"] is not None and row["rating"] <= 11.25),
        ({"in stock": False}, lambda row: row["in stock"] is False),
        ({"in stock": [True, False]}, lambda row: row["in stock"] is not None),
        (
            {"topic": "topic 2", "price": {"max": 150}, "in stock": True},
            lambda row: row["topic"] == "topic 2" and (row["price"] or 999) <= 150 and row["in stock"],
        ),
        ({"topic": "nowhere"}, lambda _: False),
        ({"price": 0.5}, lambda _: False),
        ({"price": {"min": 5, "max": 4}}, lambda _: False),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_filter_finds_only_matching_documents(
    engine: SearchBackend, corpus: Corpus, where: dict[str, Any], matches: Any
) -> None:
    rows = [{name: values[row] for name, values in corpus.columns.items()} for row in range(ROWS)]
    keep = np.array([bool(matches(row)) for row in rows])
    best = corpus.best(corpus.probes @ corpus.dense.T, 10, keep=keep)
    assert ids(search(engine, corpus.probes, k=10, where=where)) == ids(best)
    joined = search(engine, corpus.probes, corpus.terms(), k=ROWS, where=where)
    assert all({*names} == {doc_id(row) for row in np.flatnonzero(keep)} for names in ids(joined))


def test_a_large_k_returns_all_documents(engine: SearchBackend, corpus: Corpus) -> None:
    answers = search(engine, corpus.probes[:3], k=1000)
    assert all(sorted(answer) == sorted(map(doc_id, range(ROWS))) for answer in ids(answers))
    assert all(answer == sorted(answer, key=lambda each: -each[1]) for answer in answers)


def test_a_batch_and_single_queries_find_the_same(engine: SearchBackend, corpus: Corpus) -> None:
    for terms in (None, corpus.terms()):
        batch = search(engine, corpus.probes, terms, k=7)
        for query, answer in enumerate(batch):
            single_terms = None if terms is None else corpus.terms([query])
            (single,) = search(engine, corpus.probes[query : query + 1], single_terms, k=7)
            assert [name for name, _ in single] == [name for name, _ in answer]
            assert [score for _, score in single] == pytest.approx([score for _, score in answer], abs=1e-5)
    assert engine.find(corpus.probes[:0], k=5) == []


def test_a_document_and_its_vector_are_found_by_any_id(engine: SearchBackend, corpus: Corpus) -> None:
    for row in range(3):
        document, vector = engine.get(doc_id(row)), engine.vector(doc_id(row))
        assert document is not None
        assert vector is not None
        assert (document["doc_id"], document["title"]) == (doc_id(row), f"Title {row}")
        np.testing.assert_allclose(vector, corpus.dense[row], atol=1e-5)
    assert engine.get("nothing") is engine.vector("nothing") is None
    assert filters.facets(engine.documents(), engine.fields, most=5).keys() == {"topic", "größe"}


def test_columns_of_candidates_are_read_without_their_documents(
    engine: SearchBackend, corpus: Corpus
) -> None:
    (candidates,) = engine.find(corpus.probes[:1], k=4)
    columns = engine.columns(candidates.ids.tolist())
    documents = documents_of(candidates, engine.store)
    assert len(documents) == len(columns) == 4
    for candidate, document in zip(candidates.ids.tolist(), documents, strict=True):
        for name in ("doc_id", "topic", "price"):
            assert columns[candidate][name] == document[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"queries": np.ones((2, 15), np.float32)},
            r"queries have shape \(2, 15\), the index has embeddings of",
        ),
        ({"queries": np.ones((2, DIM), np.int64)}, "queries are int64: pass floats"),
        ({"queries": np.full((1, DIM), np.nan, np.float32)}, "query 0 is not finite or all zero"),
        ({"queries": np.zeros((1, DIM), np.float32)}, "query 0 is not finite or all zero"),
        ({"k": 0}, "k is 0: ask for 1 to 1000"),
        ({"k": 1001}, "k is 1001: ask for 1 to 1000"),
        ({"nprobe": 0}, "nprobe is"),
        ({"where": {"prize": 3}}, "no filter by 'prize': this index has topic, price"),
        ({"where": {"price": "3"}}, "filter price: '3' is not a value of a field of type int64"),
        ({"where": {"topic": {"min": "a"}}}, "filter topic: only numbers have ranges"),
    ],
)
def test_all_backends_refuse_an_invalid_search(
    engine: SearchBackend, corpus: Corpus, change: dict[str, Any], message: str
) -> None:
    # Without the type checker of the tests, like a normal caller.
    find = partial(getattr(type(engine).find, "__wrapped__", type(engine).find), engine)
    with pytest.raises(SearchError, match=message):
        find(**{"queries": corpus.probes, "k": 5} | change)


# --- databases ------------------------------------------------------------------------------------------


@pytest.fixture(params=CLIENTS)
def search_config(request: pytest.FixtureRequest, corpus: Corpus, tmp_path: Path) -> SearchConfig:
    pytest.importorskip(CLIENTS[request.param])
    return loaded(request.param, corpus, tmp_path)


def test_documents_deleted_in_the_database_are_not_found(search_config: SearchConfig, corpus: Corpus) -> None:
    searcher = opened(corpus, search_config)
    before = ids(search(searcher, corpus.probes, k=10))
    deleted = {name for answer in before for name in answer[:3]}
    client = searcher._collection._client
    if search_config.backend == "qdrant":
        client.delete(COLLECTION, points_selector=[databases.point_id(name) for name in deleted])
    else:
        client.delete(
            COLLECTION, filter=_expression("doc_id", [*deleted])
        )  # delete by ids does not escape them
    keep = np.array([doc_id(row) not in deleted for row in range(ROWS)])
    best = corpus.best(corpus.probes @ corpus.dense.T, 10, keep=keep)
    assert ids(search(searcher, corpus.probes, k=10)) == ids(best)
    assert searcher.vector(min(deleted)) is None
    searcher.close()
    with pytest.raises(
        ConfigError, match=rf"holds {ROWS - len(deleted)} documents, the index {ROWS}: load it with"
    ):
        opened(corpus, search_config)


def test_a_document_that_only_the_database_has_is_left_out(
    search_config: SearchConfig, corpus: Corpus
) -> None:
    searcher = opened(corpus, search_config)
    writer = databases.DATABASES[search_config.backend]
    database = object.__new__(writer)
    database.__dict__.update(searcher._collection.__dict__)
    table = pa.table({"terms": [[1]], "impacts": [[1.0]]})
    database.write(
        vectors.ExportRows(0, ["new"], corpus.probes[:1], table, pa.table({"topic": ["new"]})),
        known=True,
    )
    expected = ids(corpus.best(corpus.probes[:1] @ corpus.dense.T, 9))
    assert (
        ids(search(searcher, corpus.probes[:1], k=10)) == expected
    )  # the unknown document takes one of ten places
    assert searcher.vector("new") is None
    searcher.close()


def test_a_failing_database_raises_a_database_error(
    search_config: SearchConfig, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher = opened(corpus, search_config)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("Connection refused\nby peer")

    for name in ("query_batch_points", "search", "retrieve", "get", "count", "query"):
        monkeypatch.setattr(searcher._collection._client, name, fail, raising=False)
    for call in (
        lambda: searcher.find(corpus.probes, k=3),
        lambda: searcher.find(corpus.probes, corpus.terms(), k=3),
        lambda: searcher.vector(doc_id(0)),
        searcher.answers,
    ):
        with pytest.raises(DatabaseError, match=rf"^{search_config.backend} failed: Connection refused$"):
            call()
    searcher.close()


@pytest.mark.parametrize("backend", CLIENTS)
def test_a_collection_of_other_documents_is_refused_at_the_start(
    backend: str, corpus: Corpus, tmp_path: Path
) -> None:
    pytest.importorskip(CLIENTS[backend])
    search = loaded(backend, corpus, tmp_path, columns=("topic", "rating", "in stock", "größe"))
    with pytest.raises(
        ConfigError, match=r"lacks the column 'price', which the index filters by: load it with"
    ):
        opened(corpus, search)
    other = search.model_copy(update={"collection": "other"})
    with pytest.raises(ConfigError, match=rf"no collection 'other' of {backend} at .*--collection other`"):
        opened(corpus, other)
    database = databases.connect(backend, str(search.url), "other")
    database.open(vectors.ExportLayout(8, False, pa.schema([])))
    database._client.close()
    with pytest.raises(ConfigError, match="has 8 dimensions and no terms, the index 16 and terms"):
        opened(corpus, other)
    database = databases.connect(backend, str(search.url), "moved")
    database.open(vectors.ExportLayout(DIM, True, pa.schema([])))
    source = vectors.ExportSource(corpus.artifacts["embeddings"], corpus.artifacts["dataset"], None, FILTERS)
    for rows in source.batches(start=0, stop=ROWS, size=ROWS):
        negated = vectors.ExportRows(rows.first, rows.ids, -rows.dense, rows.sparse, rows.payload)
        database.write(negated, known=False)
    database._client.close()
    with pytest.raises(ConfigError, match=r"has another vector of .* than the index"):
        opened(corpus, search.model_copy(update={"collection": "moved"}))
