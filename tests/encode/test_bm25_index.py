"""Words weighted by BM25 in the index of a dual encoder are joined by document, tuned and searched."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from in_process import without_ray
from scalingnote.core.bm25 import BM25, document_texts
from scalingnote.encode.config import BM25Config
from scalingnote.encode.lexical import job as lexical
from scalingnote.index import job, shard
from scalingnote.index.config import FastScan, IndexConfig, Tuning
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import open_artifact
from scalingnote.storage.schema import QRELS, QUERIES
from synthetic_corpus import Corpus, unit

SIZES, MISSING = [90, 60], (7, 100)
# All documents are candidates, scored by their vectors.
CONFIG = IndexConfig(
    shards=3,
    family=FastScan(refine="flat"),
    nlist=3,
    nprobe=3,
    refine_factor=100,
    tuning=Tuning(k=sum(SIZES)),
)


@pytest.mark.parametrize("learned", [False, True])
def test_an_index_prefers_bm25_terms_to_those_of_embeddings(
    learned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_ray(monkeypatch)
    rng = np.random.default_rng(0)
    numbers = [3, 17, 42, 58, 77, 99, 120, 149]
    ids = [f"q{number}" for number in numbers]
    texts = [f"which document is {number}" for number in numbers]
    judged = [ids, [f"d{number}" for number in numbers], [1] * len(ids)]
    tables = {
        "queries": pa.table([ids, texts, ["test"] * len(ids)], schema=QUERIES),
        "qrels": pa.table(judged, names=QRELS.names).cast(QRELS),
    }
    corpus = Corpus.build(
        f"{tmp_path}/corpus", sizes=SIZES, dim=16, missing=MISSING, sparse=learned, tables=tables
    )
    # Half of the embeddings are those of other queries: for these the words must find the document.
    query_embeddings = unit(corpus.matrix[numbers] + 0.1 * rng.standard_normal((len(numbers), 16)))
    query_embeddings[::2] = query_embeddings[::2][::-1]
    monkeypatch.setattr(job, "_queries", lambda *_: query_embeddings)
    words = lexical.run(BM25Config(), dataset=corpus.uris["dataset"], output=f"{tmp_path}/words")
    index = job.run(CONFIG, **corpus.uris, bm25_terms=words.uri, output=f"{tmp_path}/index")

    layout = shard.open_layout(index)
    assert layout.sparse
    assert layout.dense_weight is not None
    assert layout.dense_weight < 1
    assert index.manifest.info["hybrid_tuning"]["queries"] == len(ids)
    documents = open_artifact(corpus.uris["dataset"], kind="dataset").table("documents")
    bm25 = BM25.build(document_texts(documents))
    terms = SparseQuery.load(words.directory("sparse_query")).encode(texts)
    searcher = Searcher.open(index.uri)
    rankings = searcher.search(query_embeddings, terms, k=100, dense_weight=0.0)
    for query, results in zip(texts, rankings, strict=True):
        scores = np.delete(bm25.scores(query), MISSING)
        expected = np.sort(scores[scores > 0] / scores.max())[::-1][:100]
        np.testing.assert_allclose([result.score for result in results], expected, rtol=2e-3)
    unknown = SparseQuery.load(words.directory("sparse_query")).encode(["zebra", "zebra 42"])
    nothing, some = searcher.search(query_embeddings[:2], unknown, k=100, dense_weight=0.0)
    assert (nothing, [hit.doc_id for hit in some]) == ([], ["d42"])
    best = [results[0].doc_id for results in searcher.search(query_embeddings, terms, k=1)]
    assert best == judged[1]
