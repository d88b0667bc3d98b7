"""What a cross-encoder leaves for a student: the artifacts of a dual encoder, and scores beside them."""

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


def test_a_cross_encoder_leaves_what_a_dual_encoder_leaves_and_scores(tmp_path: Path, monkeypatch):
    without_ray(monkeypatch)  # that it runs on Ray is known
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=24)
    given = tiny.triplets(str(tmp_path / "given"), dataset)
    rows = given.table("triplets").to_pylist()
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    draft.write_table("triplets/part-00000.parquet", given.table("triplets"))
    source = next(row for row in rows if row["split"] == "train")
    written = pa.table([["g0"], ["ba ko"], [source["query_id"]]], schema=GENERATED)
    draft.write_table("generated/part-00000.parquet", written)
    triplets, teacher = draft.commit(counts={}), tiny.cross_encoder(str(tmp_path / "teacher"))

    found = job.run_queries(
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
    table = found.table("embeddings")
    assert table["query_id"].to_pylist() == list(expected)
    assert table["split"].to_pylist() == [split for _, split, _ in expected.values()]
    asked = encoder.model.query_prompt.rows([query for query, _, _ in expected.values()])
    direct = encoder.queries(asked, [document(doc_id) for *_, doc_id in expected.values()])
    np.testing.assert_allclose(arrow.to_numpy(table["embedding"]), direct, rtol=1e-3, atol=1e-4)

    scored = np.array(found.table("scores")["scores"].to_pylist())
    for column, names in enumerate(zip(*([row["positive"], *row["negatives"]] for row in rows), strict=True)):
        direct = encoder.scores(asked[: len(rows)], [document(name) for name in names])
        np.testing.assert_allclose(scored[:, column], direct, rtol=1e-3, atol=1e-3)

    vocabulary = len(encoder.model.tokenizer)
    for name in ("tokens", "alone"):
        weight = safetensors.torch.load(Path(found.file(f"teacher/{name}.safetensors")).read_bytes())[
            "weight"
        ]
        assert weight.shape == (vocabulary, 32)
    assert found.names("teacher/")[-1] == "teacher/tokens.safetensors"

    documents = job.run_documents(
        EncodeConfig(), dataset=dataset.uri, cross_encoder=teacher.uri, output=str(tmp_path / "documents")
    )
    table = documents.table("embeddings")
    assert table["doc_id"].to_pylist() == list(texts)
    direct = arrow.l2_normalize(encoder.documents([document(doc_id) for doc_id in texts]))
    np.testing.assert_allclose(arrow.to_numpy(table["summary"]), direct, rtol=1e-2, atol=2e-3)  # float16


@pytest.mark.parametrize(("temperature", "similarity"), [(0.05, "cosine"), (None, "dot")])
def test_inherited_documents_are_ranked_as_the_teacher_scores_them(
    tmp_path: Path, monkeypatch, temperature: float | None, similarity: str
):
    """By cosines of unit vectors, or by products of proxies whose length grows with the text."""
    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    teacher = tiny.cross_encoder(str(tmp_path / "teacher"), pooling="segments", temperature=temperature)
    given = {"dataset": dataset.uri, "cross_encoder": teacher.uri}
    queries = job.run_queries(
        TeacherConfig(), **given, triplets=triplets.uri, output=str(tmp_path / "queries")
    )
    documents = job.run_documents(EncodeConfig(), **given, output=str(tmp_path / "documents"))
    asked = arrow.to_numpy(queries.table("embeddings")["embedding"])
    searched = arrow.l2_normalize(asked) @ arrow.to_numpy(documents.table("embeddings")["summary"]).T

    encoder = PairEncoder.load(teacher.directory("model"))
    rows = tiny.document_rows()
    columns = ([row[name] for row in rows] for name in ("title", "topic", "content"))
    proxies = encoder.documents(encoder.model.document_prompt.rows(*columns))
    pairs = (np.repeat(asked, len(rows), 0), np.tile(proxies, (len(asked), 1)))
    scored = relevance(*map(torch.from_numpy, pairs), temperature).numpy().reshape(searched.shape)
    first, second = np.triu_indices(len(rows), k=1)
    gap = searched[:, first] - searched[:, second]
    clear = np.abs(gap) > 2e-3  # float16 leaves the order of closer ones open
    same = np.sign(gap) == np.sign(scored[:, first] - scored[:, second])
    agreement = same[clear].mean()  # ce_rank_agreement
    assert clear.mean() > 0.5
    assert agreement >= 0.99
    assert similarity_of(queries) == documents.manifest.info["similarity"] == similarity


def test_a_cross_encoder_has_one_embedding_of_a_document(tmp_path: Path):
    dataset = tiny.dataset(str(tmp_path / "dataset"), count=8)
    teacher = tiny.cross_encoder(str(tmp_path / "teacher"))
    with pytest.raises(ConfigError, match=r"has no view \['title'\]"):
        job.run_documents(
            EncodeConfig(views=("title", "summary")),
            dataset=dataset.uri,
            cross_encoder=teacher.uri,
            output=str(tmp_path / "out"),
        )
