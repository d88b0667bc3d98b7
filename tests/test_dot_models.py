"""A model that compares by dot product ranks as in sentence-transformers, from adoption to search."""

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
    """A model's folder with another similarity."""
    edited(settings_of(path), similarity_fn_name=name)
    return path


def dot_model(path: Path) -> Path:
    """A model whose embeddings grow with the root of a text's length."""
    made = folder(path, pooling="mean_sqrt_len_tokens", normalise=False, max_length=None)
    return compared_by(made, "dot")


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
    """The folder that `distill --index` writes; its run is beside it."""
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
    """The URI of an empty artifact."""
    return Draft(str(place / kind), kind=kind, config=tiny.Nothing(), parents={}).commit(counts={}).uri


def ranking(scores: Any) -> list[list[str]]:
    """Ids of the best documents of each row of scores."""
    best = np.argsort(-np.asarray(scores), axis=1, kind="stable")[:, :K]
    return [[documents()[place]["doc_id"] for place in row] for row in best.tolist()]


def searched(index: Any) -> list[list[str]]:
    return [[hit.doc_id for hit in index.search(query, k=K, dense_weight=1.0)] for query in QUERIES]


def test_the_index_ranks_as_the_models_own_similarity(out: Path, library: SentenceTransformer):
    queries, found = library.encode_query(QUERIES), library.encode_document(texts())
    lengths = np.linalg.norm(found, axis=1)
    assert lengths.max() > 2 * lengths.min()
    own = ranking(library.similarity(queries, found))
    cosines = ranking(arrow.l2_normalize(queries) @ arrow.l2_normalize(found).T)
    assert own != cosines
    assert searched(scalingnote.Index(f"{out}.run", escalate=1.0)) == own  # the teacher encodes every query
    assert artifact(out, "index").read_json("index.json")["similarity"] == "dot"
    # The table's queries are other ones, of any length: that changes no order.
    index = scalingnote.Index(f"{out}.run")
    table = scalingnote.QueryEncoder(out)
    for normalize in (True, False):
        assert searched(index) == ranking(table.encode(QUERIES, normalize=normalize) @ found.T)
    hit = index.search(QUERIES[0], k=1, dense_weight=1.0)[0]
    assert hit.score == pytest.approx(1.0)  # a joined score is still scaled to the best document's


def test_the_written_folder_compares_as_the_model(out: Path, library: SentenceTransformer):
    model = SentenceTransformer(str(out), device="cpu", trust_remote_code=True)
    assert model.similarity_fn_name == library.similarity_fn_name == "dot"
    found = library.encode_document(texts())
    np.testing.assert_allclose(model.encode_document(texts()), found, atol=1e-5)
    queries = model.encode_query(QUERIES)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)
    table = scalingnote.QueryEncoder(out)
    np.testing.assert_allclose(queries, table.encode(QUERIES), atol=2e-3)
    assert "compare them by dot" in (out / "README.md").read_text()
    assert ranking(model.similarity(queries, model.encode_document(texts()))) == searched(
        scalingnote.Index(f"{out}.run")
    )
    assert published_model.similarity_of(out) == "dot"


def test_documents_keep_their_length_wherever_they_go(
    out: Path, library: SentenceTransformer, tmp_path: Path
):
    found = library.encode_document(texts())
    embeddings = artifact(out, "embeddings")
    close: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(arrow.to_numpy(embeddings.table("embeddings")["summary"]), found, **close)
    vectors.export(
        vectors.of_embeddings(embeddings.uri, columns=None),
        Parquet(str(tmp_path), "rows"),
        checkpoint=str(tmp_path / "checkpoint"),
    )
    (file,) = (tmp_path / "rows").glob("*.parquet")
    exported = arrow.to_numpy(pa.parquet.read_table(file)["dense"])
    np.testing.assert_allclose(exported, found, **close)
    flow = DocumentFlow.load(artifact(out, "dual_encoder"), artifact(out, "semantic_ids"), embeddings)
    rows = artifact(out, "dataset").table("documents").slice(0, 3)
    np.testing.assert_allclose(arrow.to_numpy(flow(rows).table["summary"]), found[:3], **close)


def test_agreement_is_measured_by_the_models_own_similarity(out: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[ndarray] = []

    def overlap(teacher: ndarray, student: ndarray, documents: ndarray, *, k: int) -> float:
        seen.append(documents)
        return 1.0

    monkeypatch.setattr(agreement, "neighbour_overlap", overlap)
    names = ("dataset", "dual_encoder", "query_embeddings", "student")
    agreement.compare(**{name: artifact(out, name) for name in names})
    lengths = np.linalg.norm(seen[0], axis=1)
    assert lengths.max() > 2 * lengths.min()


def test_dot_models_are_refused_where_only_cosine_works(
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


def test_a_student_for_documents_is_compared_as_its_teacher(out: Path, tmp_path: Path):
    from scalingnote.train.distillation import job
    from scalingnote.train.distillation.config import DistillConfig

    made = str(folder(tmp_path / "model", pooling="cls", normalise=True))
    document = {"backbone": {"kind": "pretrained", "path": made}, "pooling": "cls", "normalise": False}
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
        ("dot", True, None, "cosine"),  # of unit vectors they are the same
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
def test_a_similarity_is_honoured_or_refused(
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


def test_truncated_embeddings_are_no_unit_vectors(tmp_path: Path):
    path = compared_by(folder(tmp_path, truncate_dim=8), "dot")
    towers = adopt.run(AdoptConfig(path=str(path)), output=str(tmp_path / "towers"))
    assert towers.manifest.info["similarity"] == published_model.similarity_of(path) == "dot"


def test_the_models_of_a_pair_compare_alike(tmp_path: Path):
    query, document = folder(tmp_path / "q", normalise=False), folder(tmp_path / "d", normalise=False)
    compared_by(document, "dot")
    config = AdoptConfig(path=str(document), query_path=str(query))
    with pytest.raises(ConfigError, match=r"by cosine and .* by dot: set adopt\.similarity"):
        adopt.run(config, output=str(tmp_path / "towers"))
    chosen = config.model_copy(update={"similarity": "dot"})
    assert adopt.run(chosen, output=str(tmp_path / "pair")).manifest.info["similarity"] == "dot"
