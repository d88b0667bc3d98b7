"""The towers behind mteb's interface: by the interface alone, and through mteb's own search where it is."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tiny
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError
from scalingnote.evaluate.mteb_model import MtebModel
from scalingnote.models import backbone, tower
from scalingnote.storage import arrow

DIM = 16
ROWS = tiny.document_rows(12)
CORPUS = [{"id": row["doc_id"], "title": row["title"], "text": row["content"]} for row in ROWS]
QUERIES = [{"id": f"q{i}", "text": row["title"]} for i, row in enumerate(ROWS[:4])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    tokenizer = backbone.train_tokenizer([" ".join(row.values()) for row in ROWS], vocabulary=300)
    for role, config in (("query", tiny.query_tower()), ("document", tiny.document_tower())):
        tower.build(config, role=role, dim=DIM, tokenizer_json=tokenizer, seed=1).save(root / role)
    return {role: root / role for role in ("query", "document")}


@pytest.fixture(scope="module")
def model(folders) -> MtebModel:
    return MtebModel.load(folders["query"], folders["document"], name="ours/tiny")


def expected(folders) -> np.ndarray:
    """Cosines of the queries with the documents, by the encoders themselves."""
    table = pa.table(
        {"title": [r["title"] for r in CORPUS], "topic": [""] * 12, "content": [r["text"] for r in CORPUS]}
    )
    documents = Encoder.load(folders["document"]).encode_documents(table)["summary"]
    queries = QueryEncoder.load(folders["query"]).encode_queries([row["text"] for row in QUERIES])
    return arrow.l2_normalize(queries) @ arrow.l2_normalize(documents).T


def test_batches_go_through_the_tower_of_their_role(model, folders):
    titles, bodies = [r["title"] for r in CORPUS], [r["text"] for r in CORPUS]
    batches = [
        {"title": titles[i : i + 5], "body": bodies[i : i + 5], "text": ["unused"] * 5} for i in (0, 5, 10)
    ]
    documents = model.encode(
        batches, task_metadata=None, hf_split="test", hf_subset="en", prompt_type="document"
    )
    queries = model.encode([{"text": [row["text"] for row in QUERIES]}], prompt_type="query", batch_size=32)
    assert (documents.shape, queries.shape) == ((12, DIM), (4, DIM))
    scores = expected(folders)
    np.testing.assert_allclose(model.similarity(queries, documents), scores, atol=1e-5)
    np.testing.assert_allclose(model.similarity_pairwise(queries, documents[:4]), np.diag(scores), atol=1e-5)
    np.testing.assert_array_equal(
        model.encode([{"text": ["a query"]}]), model.encode([{"query": ["a query"]}])
    )
    assert model.encode([]).shape == (0, DIM)


def test_towers_of_different_widths_are_refused(folders):
    query, document = QueryEncoder.load(folders["query"]), Encoder.load(folders["document"])
    query.dim = 8
    with pytest.raises(ConfigError, match="gives 8 dimensions, the document tower 16"):
        MtebModel(query, document, name="ours/tiny")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mtebs_search_finds_what_exact_search_finds(model, folders):
    mteb = pytest.importorskip("mteb", reason="pip install scalingnote[mteb]")
    from mteb.models import SearchEncoderWrapper
    from mteb.models.models_protocols import EncoderProtocol

    import datasets

    assert isinstance(model, EncoderProtocol)
    assert model.mteb_model_meta.name == "ours/tiny"
    about = {"task_metadata": mteb.get_task("SciFact").metadata, "hf_split": "test", "hf_subset": "default"}
    knobs = {"encode_kwargs": {"batch_size": 5}, "num_proc": None}
    search = SearchEncoderWrapper(model)
    search.index(datasets.Dataset.from_list(CORPUS), **about, **knobs)
    found = search.search(datasets.Dataset.from_list(QUERIES), top_k=3, **about, **knobs)
    for row, query in zip(expected(folders), QUERIES, strict=True):
        best = np.argsort(-row)[:3]
        assert found[query["id"]] == pytest.approx({CORPUS[i]["id"]: row[i] for i in best.tolist()}, abs=1e-5)
