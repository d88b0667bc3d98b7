"""Results of a cross-encoder for a student: the artifacts of a dual encoder, and scores of triplets."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch

import tiny
from in_process import without_ray
from scalingnote.core.errors import ConfigError
from scalingnote.encode.config import EncodeConfig, TeacherConfig
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Draft
from scalingnote.train.cross_encoder import job
from scalingnote.train.cross_encoder.pairs import PairEncoder, relevance
from scalingnote.train.distillation.job import similarity_of

GENERATED = pa.schema({"query_id": pa.string(), "query": pa.string(), "source_query_id": pa.string()})


def test_a_cross_encoder_writes_embeddings_scores_and_vocabulary(tmp_path: Path, monkeypatch):
    without_ray(monkeypatch)  # other tests run it on Ray
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=24)
    originals = tiny.triplets(str(tmp_path / "given"), dataset)
    rows = originals.table("triplets").to_pylist()
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    draft.write_table("triplets/part-00000.parquet", originals.table("triplets"))
    source = next(row for row in rows if row["split"] == "train")
    generated = pa.table([["g0"], ["ba ko"], [source["query_id"]]], schema=GENERATED)
    draft.write_table("generated/part-00000.parquet", generated)
    triplets, teacher = draft.commit(counts={}), tiny.cross_encoder(str(tmp_path / "teacher"))

    queries = job.run_queries(
        TeacherConfig(),
        dataset=dataset.uri,
        triplets=triplets.uri,
        cross_encoder=teacher.uri,
        output=str(tmp_path / "queries"),
    )
    encoder = PairEncoder.load(teacher.directory("model"), temperature=0.05)
    texts = {row["doc_id"]: row for row in tiny.document_rows(24)}

    def document(doc_id: str):
        fields = ([texts[doc_id][name]] for name in ("title", "topic", "content"))
        return encoder.model.document_prompt.rows(*fields)[0]

    expected = {row["query_id"]: (row["query"], row["split"], row["positive"]) for row in rows}
    expected["g0"] = ("ba ko", "train", source["positive"])
    table = queries.table("embeddings")
    assert table["query_id"].to_pylist() == list(expected)
    assert table["split"].to_pylist() == [split for _, split, _ in expected.values()]
    query_rows = encoder.model.query_prompt.rows([query for query, _, _ in expected.values()])
    direct = encoder.queries(query_rows, [document(doc_id) for *_, doc_id in expected.values()])
    np.testing.assert_allclose(arrow.to_numpy(table["embedding"]), direct, rtol=1e-3, atol=1e-4)

    scores = np.array(queries.table("scores")["scores"].to_pylist())
    for column, names in enumerate(zip(*([row["positive"], *row["negatives"]] for row in rows), strict=True)):
        direct = encoder.scores(query_rows[: len(rows)], [document(name) for name in names])
        np.testing.assert_allclose(scores[:, column], direct, rtol=1e-3, atol=1e-3)

    vocabulary = len(encoder.model.tokenizer)
    for name in ("tokens", "alone"):
        weight = safetensors.torch.load(Path(queries.file(f"teacher/{name}.safetensors")).read_bytes())[
            "weight"
        ]
        assert weight.shape == (vocabulary, 32)
    assert queries.names("teacher/")[-1] == "teacher/tokens.safetensors"

    documents = job.run_documents(
        EncodeConfig(), dataset=dataset.uri, cross_encoder=teacher.uri, output=str(tmp_path / "documents")
    )
    table = documents.table("embeddings")
    assert table["doc_id"].to_pylist() == list(texts)
    direct = arrow.l2_normalize(encoder.documents([document(doc_id) for doc_id in texts]))
    np.testing.assert_allclose(arrow.to_numpy(table["summary"]), direct, rtol=1e-2, atol=2e-3)  # float16


@pytest.mark.parametrize(("temperature", "similarity"), [(0.05, "cosine"), (None, "dot")])
def test_search_ranks_documents_the_same_as_the_teacher_scores(
    tmp_path: Path, monkeypatch, temperature: float | None, similarity: str
):
    """By cosines of unit vectors, or by products of proxies with a length that grows with the text."""
    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    teacher = tiny.cross_encoder(str(tmp_path / "teacher"), pooling="segments", temperature=temperature)
    uris = {"dataset": dataset.uri, "cross_encoder": teacher.uri}
    queries = job.run_queries(
        TeacherConfig(), **uris, triplets=triplets.uri, output=str(tmp_path / "queries")
    )
    documents = job.run_documents(EncodeConfig(), **uris, output=str(tmp_path / "documents"))
    query_vectors = arrow.to_numpy(queries.table("embeddings")["embedding"])
    search_scores = (
        arrow.l2_normalize(query_vectors) @ arrow.to_numpy(documents.table("embeddings")["summary"]).T
    )

    encoder = PairEncoder.load(teacher.directory("model"))
    rows = tiny.document_rows()
    columns = ([row[name] for row in rows] for name in ("title", "topic", "content"))
    proxies = encoder.documents(encoder.model.document_prompt.rows(*columns))
    pairs = (np.repeat(query_vectors, len(rows), 0), np.tile(proxies, (len(query_vectors), 1)))
    teacher_scores = (
        relevance(*map(torch.from_numpy, pairs), temperature).numpy().reshape(search_scores.shape)
    )
    first, second = np.triu_indices(len(rows), k=1)
    gap = search_scores[:, first] - search_scores[:, second]
    clear = np.abs(gap) > 2e-3  # float16 does not determine the order of closer ones
    same_order = np.sign(gap) == np.sign(teacher_scores[:, first] - teacher_scores[:, second])
    agreement = same_order[clear].mean()  # ce_rank_agreement
    assert clear.mean() > 0.5
    assert agreement >= 0.99
    assert similarity_of(queries) == documents.manifest.info["similarity"] == similarity


def test_a_cross_encoder_has_only_one_view_of_a_document(tmp_path: Path):
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=8)
    teacher = tiny.cross_encoder(str(tmp_path / "teacher"))
    with pytest.raises(ConfigError, match=r"has no view \['title'\]"):
        job.run_documents(
            EncodeConfig(views=("title", "summary")),
            dataset=dataset.uri,
            cross_encoder=teacher.uri,
            output=str(tmp_path / "out"),
        )
