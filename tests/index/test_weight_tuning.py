"""The tuned weight of embeddings in hybrid search, compared with a computation over all documents."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from in_process import run_without_ray
from scalingnote.index import hybrid, job
from scalingnote.index.config import FastScan, IndexConfig, Tuning
from scalingnote.index.hybrid import HybridCandidates
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.schema import QRELS, QUERIES
from synthetic_corpus import Corpus, Settings, unit

DOCUMENTS, QUERY_COUNT = 150, 24
# All documents are candidates with exact scores.
CONFIG = IndexConfig(
    shards=3,
    family=FastScan(refine="flat"),
    nlist=3,
    nprobe=3,
    refine_factor=100,
    tuning=Tuning(k=DOCUMENTS),
)


def _towers(uri: str) -> Artifact:
    """Write an artifact without towers that turns the digits of a text into terms."""
    tokenizer = Tokenizer(WordLevel({str(digit): digit for digit in range(10)} | {"?": 10}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    draft = Draft(uri, kind="dual_encoder", config=Settings(), parents={})
    SparseQuery(tokenizer, max_length=9, weighting="counts").save(Path(uri, "sparse_query"))
    return draft.commit(counts={})


def test_the_tuned_weight_is_that_of_all_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    numbers = rng.choice(DOCUMENTS, QUERY_COUNT, replace=False).tolist()
    ids = [f"q{number:02d}" for number in range(QUERY_COUNT)]
    # Each query has a relevant and an irrelevant document; one judged document is not indexed, and one query
    # has no judgement.
    rows = [(ids[i], f"d{number}", 2) for i, number in enumerate(numbers[:-1])]
    rows += [(ids[i], f"d{(number + 1) % DOCUMENTS}", 0) for i, number in enumerate(numbers[:-1])]
    rows += [(ids[0], "gone", 1), ("another", "d7", 1)]
    texts = [" ".join(str(number)) for number in numbers]
    tables = {
        "queries": pa.table([ids, texts, ["test"] * QUERY_COUNT], schema=QUERIES),
        "qrels": pa.table([pa.array(column) for column in zip(*rows, strict=True)], names=QRELS.names).cast(
            QRELS
        ),
    }
    corpus = Corpus.build(f"{tmp_path}/corpus", sizes=[90, 60], dim=16, sparse=True, tables=tables)
    embeddings = unit(corpus.matrix[numbers] + 0.1 * rng.standard_normal((QUERY_COUNT, 16)))
    # Every third embedding is that of another query, for which only terms find the document.
    embeddings = np.where(np.arange(QUERY_COUNT)[:, None] % 3 == 0, rng.permutation(embeddings), embeddings)
    monkeypatch.setattr(job, "_queries", lambda *_: embeddings)
    towers = _towers(f"{tmp_path}/towers")
    index = run_without_ray(
        job.run, CONFIG, **corpus.uris, dual_encoder=towers.uri, output=f"{tmp_path}/index"
    )

    terms = np.array([[str(i).count(str(t)) for t in range(10)] for i in range(DOCUMENTS)], np.float32)
    all_rows = np.tile(np.arange(DOCUMENTS), (QUERY_COUNT, 1))
    both = HybridCandidates(all_rows, embeddings @ corpus.matrix.T, terms[numbers] @ terms.T)
    relevant = [{number: 2, (number + 1) % DOCUMENTS: 0} for number in numbers[:-1]] + [{}]
    background = float((embeddings @ corpus.matrix.T).mean())
    dense_weight, curve = hybrid.tune_weight(both, relevant, background=background)
    layout = index.read_json("index.json")
    assert layout["dense_weight"] == dense_weight
    assert 0 < dense_weight < 1  # both sides are needed
    tuning = index.manifest.info["hybrid_tuning"]
    assert tuning["queries"] == QUERY_COUNT - 1
    assert {point["dense_weight"]: point["ndcg@10"] for point in tuning["curve"]} == pytest.approx(
        {weight: round(value, 4) for weight, value in curve.items()}, abs=2e-4
    )
    searcher = Searcher.open(index.uri)
    rows_of = SparseQuery.load(towers.directory("sparse_query")).encode(texts)
    by_default, by_tuned, by_another = (
        searcher.search(embeddings, rows_of, k=9, dense_weight=weight)
        for weight in (None, dense_weight, 1 - dense_weight / 2)
    )
    assert by_default == by_tuned != by_another


def test_without_judgements_the_weight_is_not_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"queries": pa.table([["q1"], ["1 2"], ["test"]], schema=QUERIES)}
    corpus = Corpus.build(f"{tmp_path}/corpus", sizes=[60], dim=16, sparse=True, tables=tables)
    monkeypatch.setattr(job, "_queries", lambda *_: corpus.matrix[:1])
    config = CONFIG.model_copy(update={"shards": 1, "nlist": 1, "nprobe": 1})
    towers = _towers(f"{tmp_path}/towers")
    index = run_without_ray(
        job.run, config, **corpus.uris, dual_encoder=towers.uri, output=f"{tmp_path}/index"
    )
    assert "no test query has a relevant indexed document" in caplog.text
    assert index.read_json("index.json")["dense_weight"] is None
    assert index.manifest.info["hybrid_tuning"] == {}
    searcher, terms = Searcher.open(index.uri), SparseQuery.load(towers.directory("sparse_query"))
    query = corpus.matrix[:1], terms.encode(["1 2"])
    default, half = (searcher.search(*query, k=5, dense_weight=weight) for weight in (None, 0.5))
    assert default == half
