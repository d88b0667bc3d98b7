"""Published folders and the search of a run as models of mteb."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import families
import published
import tiny
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate import mteb_model
from scalingnote.evaluate.measures import measure
from scalingnote.evaluate.mteb_model import MtebSearch
from scalingnote.models import dual_encoder, lookup
from scalingnote.models.config import LookupConfig
from scalingnote.models.publish import write_router
from scalingnote.storage import arrow

ROWS = tiny.document_rows(12)
CORPUS = [{"id": row["doc_id"], "title": row["title"], "text": row["content"]} for row in ROWS]
QUERIES = [{"id": f"q{i}", "text": row["title"]} for i, row in enumerate(ROWS[:4])]


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Path:
    """Write a published model with prompts and a table to one folder."""
    root = tmp_path_factory.mktemp("router")
    teacher = published.folder(root / "teacher", prompts=published.PROMPTS, max_length=40)
    dual_encoder.load_tower(teacher, "document").save(root / "document")
    tokens = families.tokenizer().backend_tokenizer.to_str()
    table = lookup.build(LookupConfig(), dim=published.HIDDEN, tokenizer_json=tokens, seed=0)
    table.save(root / "query")
    write_router(root / "query", root / "document", root / "ours")
    return root / "ours"


@pytest.fixture(scope="module")
def beir(tmp_path_factory) -> Path:
    """Write a folder in the BEIR layout; each query has two relevant documents with different grades."""
    folder = tmp_path_factory.mktemp("beir") / "tiny"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": row["id"], "title": row["title"], "text": row["text"]} for row in CORPUS]
    queries = [{"_id": row["id"], "text": row["text"]} for row in QUERIES]
    for name, rows in (("corpus", corpus), ("queries", [*queries, {"_id": "other", "text": "not judged"}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judgements = [
        f"{q['id']}\t{CORPUS[(i + j) % 12]['id']}\t{2 - j}\n" for i, q in enumerate(QUERIES) for j in (0, 1)
    ]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judgements))
    return folder


def expected_ndcg(router: Path) -> float:
    """Compute nDCG@10 of the towers of the folder by our measures."""
    table = pa.table(
        {"title": [r["title"] for r in CORPUS], "topic": [""] * 12, "content": [r["text"] for r in CORPUS]}
    )
    encoder = Encoder(dual_encoder.load_tower(router, "document"))
    queries = QueryEncoder(router).encode_queries([row["text"] for row in QUERIES])
    scores = arrow.l2_normalize(queries) @ arrow.l2_normalize(encoder.encode_documents(table)["summary"]).T
    rankings = {
        query["id"]: [CORPUS[i]["id"] for i in np.argsort(-row)]
        for query, row in zip(QUERIES, scores, strict=True)
    }
    grades = {q["id"]: {CORPUS[i]["id"]: 2, CORPUS[i + 1]["id"]: 1} for i, q in enumerate(QUERIES)}
    return measure(rankings, grades)["nDCG@10"]


@pytest.mark.filterwarnings("ignore")
def test_mteb_evaluates_a_router_folder_on_a_beir_folder(router, beir, tmp_path):
    pytest.importorskip("mteb", reason="pip install scalingnote[mteb]")
    model = mteb_model.folder_model(router)
    (measures,) = mteb_model.evaluate(model, [mteb_model.beir_task(beir)], to=tmp_path).values()
    assert measures["ndcg_at_10"] == pytest.approx(expected_ndcg(router), abs=1e-5)
    (results,) = tmp_path.rglob("tiny.json")
    assert json.loads(results.read_text())["scores"]["test"][0]["ndcg_at_10"] == measures["ndcg_at_10"]
    meta = json.loads((results.parent / "model_meta.json").read_text())
    assert (meta["name"], meta["embed_dim"]) == ("scalingnote/ours", published.HIDDEN)
    assert meta["revision"] == mteb_model.folder_model(router).mteb_model_meta.revision


@dataclass(frozen=True)
class Hit:
    doc_id: str
    score: float


class WordSearch:
    """A searcher and a query path that find the documents that share most words with the query."""

    def __call__(self, queries):
        return [SimpleNamespace(embedding=query, terms=None) for query in queries]

    def search(self, query, terms, *, k):
        scores = {row["id"]: float(len({*query.split()} & {*row["title"].split()})) for row in CORPUS}
        best = sorted(scores, key=lambda doc: (-scores[doc], doc))[:k]
        return [[Hit(doc, scores[doc]) for doc in best]]


@pytest.mark.filterwarnings("ignore")
def test_mteb_evaluates_the_search_of_a_run(beir, tmp_path, monkeypatch):
    pytest.importorskip("mteb", reason="pip install scalingnote[mteb]")
    monkeypatch.setattr(mteb_model, "QUERIES_PER_BLOCK", 3)
    doc_ids = [row["id"] for row in CORPUS]
    model = MtebSearch(WordSearch(), WordSearch(), doc_ids, about={"name": "ours/search", "revision": "1"})
    (measures,) = mteb_model.evaluate(model, [mteb_model.beir_task(beir)], to=tmp_path).values()
    assert measures["mrr_at_1"] >= 0.75  # a query is the title of its document
    assert model.mteb_model_meta.model_type == ["hybrid"]
    hits = model.search({"id": ["q1"], "text": [QUERIES[1]["text"]]}, top_k=2)
    assert next(iter(hits["q1"])) == CORPUS[1]["id"]
    with pytest.raises(DataError, match="the task has 11 documents, the run indexed 12; 1 are only in one"):
        model.index({"id": doc_ids[1:]})
    with pytest.raises(ConfigError, match="re-ranking tasks need a published folder"):
        model.search({"id": [], "text": []}, top_k=2, top_ranked={})
