"""A model with dot product ranks as in sentence-transformers, from adoption to search."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy import ndarray
from sentence_transformers import SentenceTransformer

import scalingnote
import tiny
from in_process import without_ray
from published import edited, folder, settings_of
from scalingnote import api
from scalingnote.cli import main as cli
from scalingnote.core.errors import ConfigError
from scalingnote.export import vectors
from scalingnote.export.databases import Parquet
from scalingnote.fuse import job as fuse
from scalingnote.fuse.config import FuseConfig
from scalingnote.models import adopt, published_model
from scalingnote.models.config import AdoptConfig
from scalingnote.models.dual_encoder import load_tower
from scalingnote.run import pipeline
from scalingnote.run.ingest import DocumentFlow
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.distillation import agreement

QUERIES = [row["title"] for row in tiny.document_rows()[:6]]
K = 10


def compared_by(path: Path, name: str | None) -> Path:
    """Set another similarity in a model's folder."""
    edited(settings_of(path), similarity_fn_name=name)
    return path


def dot_model(path: Path) -> Path:
    """Write a model with embeddings that grow with the root of a text's length."""
    path_of_model = folder(path, pooling="mean_sqrt_len_tokens", normalise=False, max_length=None)
    return compared_by(path_of_model, "dot")


def documents() -> list[dict[str, str]]:
    rows = []
    for number, row in enumerate(tiny.document_rows()):
        words = row["content"].split() * 5
        text = " ".join(words[: (1, 4, 16, 64)[number % 4]])
        rows.append({"doc_id": row["doc_id"], "title": row["title"].split()[0], "text": text})
    return rows


def written(path: Path) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in documents()))
    return path


def texts() -> list[str]:
    return [f"{row['title']} {row['text']}" for row in documents()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dot_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def library(model: Path) -> SentenceTransformer:
    return SentenceTransformer(str(model), device="cpu")


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `distill --index` writes; its run is next to it."""
    place = tmp_path_factory.mktemp("distilled")
    words = ["distill", str(model), "--texts", str(written(place / "docs.jsonl")), "--to", str(place / "out")]
    settings = (
        "distill.epochs=2",
        "pseudo_queries.validation_share=0.1",
        "pseudo_queries.count=300",
        "encode.dtype=float32",
        "dataset.passages=null",
    )
    words += [word for each in settings for word in ("--set", each)]
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        assert cli.main([*words, "--index"]) == 0
    return place / "out"


def artifact(out: Path, kind: str) -> Artifact:
    return pipeline.locate(pipeline.load_run(f"{out}.run"), kind)


def nothing(place: Path, kind: str) -> str:
    """Build an empty artifact; return its URI."""
    return Draft(str(place / kind), kind=kind, config=tiny.Nothing(), parents={}).commit(counts={}).uri


def ranking(scores: Any) -> list[list[str]]:
    """Return the ids of the best documents of each row of scores."""
    best = np.argsort(-np.asarray(scores), axis=1, kind="stable")[:, :K]
    return [[documents()[place]["doc_id"] for place in row] for row in best.tolist()]


def searched(index: Any) -> list[list[str]]:
    return [[hit.doc_id for hit in index.search(query, k=K, dense_weight=1.0)] for query in QUERIES]


def test_the_index_ranks_by_the_models_own_similarity(out: Path, library: SentenceTransformer):
    queries, documents_embedded = library.encode_query(QUERIES), library.encode_document(texts())
    lengths = np.linalg.norm(documents_embedded, axis=1)
    assert lengths.max() > 2 * lengths.min()
    expected = ranking(library.similarity(queries, documents_embedded))
    cosines = ranking(arrow.l2_normalize(queries) @ arrow.l2_normalize(documents_embedded).T)
    assert expected != cosines
    # The teacher encodes every query.
    assert searched(scalingnote.Index(f"{out}.run", escalate=1.0)) == expected
    assert artifact(out, "index").read_json("index.json")["similarity"] == "dot"
    # The table's queries have any length, which does not change the order.
    index = scalingnote.Index(f"{out}.run")
    table = scalingnote.QueryEncoder(out)
    for normalize in (True, False):
        assert searched(index) == ranking(table.encode(QUERIES, normalize=normalize) @ documents_embedded.T)
    hit = index.search(QUERIES[0], k=1, dense_weight=1.0)[0]
    assert hit.score == pytest.approx(1.0)  # a joined score is still scaled to the best document's


def test_the_written_folder_has_the_similarity_of_the_model(out: Path, library: SentenceTransformer):
    model = SentenceTransformer(str(out), device="cpu", trust_remote_code=True)
    assert model.similarity_fn_name == library.similarity_fn_name == "dot"
    expected = library.encode_document(texts())
    np.testing.assert_allclose(model.encode_document(texts()), expected, atol=1e-5)
    queries = model.encode_query(QUERIES)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)
    table = scalingnote.QueryEncoder(out)
    np.testing.assert_allclose(queries, table.encode(QUERIES), atol=2e-3)
    assert "compare them by dot" in (out / "README.md").read_text()
    assert ranking(model.similarity(queries, model.encode_document(texts()))) == searched(
        scalingnote.Index(f"{out}.run")
    )
    assert published_model.similarity_of(out) == "dot"


def test_document_vectors_keep_their_length(out: Path, library: SentenceTransformer, tmp_path: Path):
    expected = library.encode_document(texts())
    embeddings = artifact(out, "embeddings")
    close: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(arrow.to_numpy(embeddings.table("embeddings")["summary"]), expected, **close)
    vectors.export(
        vectors.of_embeddings(embeddings.uri, columns=None),
        Parquet(str(tmp_path), "rows"),
        checkpoint=str(tmp_path / "checkpoint"),
    )
    (file,) = (tmp_path / "rows").glob("*.parquet")
    exported = arrow.to_numpy(pa.parquet.read_table(file)["dense"])
    np.testing.assert_allclose(exported, expected, **close)
    flow = DocumentFlow.load(artifact(out, "dual_encoder"), artifact(out, "semantic_ids"), embeddings)
    rows = artifact(out, "dataset").table("documents").slice(0, 3)
    np.testing.assert_allclose(arrow.to_numpy(flow(rows).table["summary"]), expected[:3], **close)


def test_agreement_uses_the_models_own_similarity(out: Path, monkeypatch: pytest.MonkeyPatch):
    compared: list[ndarray] = []

    def overlap(teacher: ndarray, student: ndarray, documents: ndarray, *, k: int) -> float:
        compared.append(documents)
        return 1.0

    monkeypatch.setattr(agreement, "neighbour_overlap", overlap)
    names = ("dataset", "dual_encoder", "query_embeddings", "student")
    agreement.compare(**{name: artifact(out, name) for name in names})
    lengths = np.linalg.norm(compared[0], axis=1)
    assert lengths.max() > 2 * lengths.min()


def test_dot_models_are_an_error_if_cosine_is_required(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from scalingnote.train.distillation import job
    from scalingnote.train.distillation.config import DistillConfig

    without_ray(monkeypatch)
    uris = {name: artifact(out, name).uri for name in ("dataset", "embeddings", "semantic_ids")}
    with pytest.raises(ConfigError, match=r"fusion scales them to 1.*adopt\.similarity to cosine"):
        fuse.run(
            FuseConfig(),
            **uris,
            planner=nothing(tmp_path, "planner"),
            student=artifact(out, "student").uri,
            output=str(tmp_path / "fused"),
        )
    symmetric = {"losses": {"one_hot": 1.0}, "document": {}, "resources": {"workers": 0}}
    with pytest.raises(ConfigError, match=r"compares by dot.*set its pooling to cls"):
        job.run(
            DistillConfig.model_validate(symmetric),
            query_embeddings=artifact(out, "query_embeddings").uri,
            dataset=uris["dataset"],
            embeddings=uris["embeddings"],
            triplets=nothing(tmp_path, "triplets"),
            output=str(tmp_path / "student"),
        )


def test_a_document_student_has_the_teachers_similarity(out: Path, tmp_path: Path):
    from scalingnote.train.distillation import job
    from scalingnote.train.distillation.config import DistillConfig

    model_folder = str(folder(tmp_path / "model", pooling="cls", normalise=True))
    document = {
        "backbone": {"kind": "pretrained", "path": model_folder},
        "pooling": "cls",
        "normalise": False,
    }
    config = DistillConfig.model_validate({"losses": {"one_hot": 1.0}, "document": document})
    teacher = artifact(out, "query_embeddings")
    assert job.similarity_of(teacher) == "dot"
    student = job._document_student(config, None, dim=tiny.CAUSAL.hidden, teacher=teacher)
    student.save(tmp_path / "saved")
    assert published_model.similarity_of(tmp_path / "saved") == "dot"


@pytest.mark.parametrize(
    ("name", "normalise", "setting", "expected"),
    [
        ("cosine", False, None, "cosine"),
        (None, False, None, "cosine"),  # as in the library
        ("dot", False, None, "dot"),
        ("dot", True, None, "cosine"),  # they are equal for unit vectors
        ("euclidean", True, None, "cosine"),  # these rank alike
        ("dot", False, "cosine", "cosine"),
        ("euclidean", False, "dot", "dot"),
        ("manhattan", True, "cosine", "cosine"),
        ("cosine", False, "dot", "dot"),
        ("euclidean", False, None, None),
        ("manhattan", False, None, None),
        ("manhattan", True, None, None),
        ("maxsim", False, None, None),
    ],
)
def test_a_similarity_is_used_or_an_error(
    tmp_path: Path, name: str | None, normalise: bool, setting: Any, expected: str | None
):
    path = compared_by(folder(tmp_path, normalise=normalise), name)
    config = AdoptConfig(path=str(path), similarity=setting)
    if expected is None:
        with pytest.raises(ConfigError, match=rf"compares embeddings by '{name}'.*set adopt\.similarity"):
            adopt.run(config, output=str(tmp_path / "towers"))
        with pytest.raises(ConfigError, match=r"set adopt\.similarity"):  # before any text is read
            api.run_config(
                path, written(tmp_path / "docs.jsonl"), to=tmp_path / "out", student="table", queries=None,
                count=None, seed=0, run_dir=None, columns={}, overrides=(),
            )  # fmt: skip
        return
    towers = adopt.run(config, output=str(tmp_path / "towers"))
    assert towers.manifest.info["similarity"] == expected
    for role in ("query", "document"):
        saved = SentenceTransformer(str(towers.directory(role)), device="cpu")
        assert saved.similarity_fn_name == expected
        again: Any = load_tower(towers.directory(role))
        again.save(tmp_path / "again" / role)
        assert published_model.similarity_of(tmp_path / "again" / role) == expected


def test_truncated_embeddings_are_not_unit_vectors(tmp_path: Path):
    path = compared_by(folder(tmp_path, truncate_dim=8), "dot")
    towers = adopt.run(AdoptConfig(path=str(path)), output=str(tmp_path / "towers"))
    assert towers.manifest.info["similarity"] == published_model.similarity_of(path) == "dot"


def test_both_models_of_a_pair_need_the_same_similarity(tmp_path: Path):
    query, document = folder(tmp_path / "q", normalise=False), folder(tmp_path / "d", normalise=False)
    compared_by(document, "dot")
    config = AdoptConfig(path=str(document), query_path=str(query))
    with pytest.raises(ConfigError, match=r"by cosine and .* by dot: set adopt\.similarity"):
        adopt.run(config, output=str(tmp_path / "towers"))
    dot_config = config.model_copy(update={"similarity": "dot"})
    assert adopt.run(dot_config, output=str(tmp_path / "pair")).manifest.info["similarity"] == "dot"
