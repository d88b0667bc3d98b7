"""A folder with a student and its teacher gives the same embeddings in sentence-transformers and here."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
import torch
from huggingface_hub import HfApi
from numpy import ndarray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm, StaticEmbedding
from tokenizers import Tokenizer
from torch import nn

import families
from published import CONTENTS, HIDDEN, PROMPTS, QUERIES, TEXTS, TITLES, edited, folder, settings_of
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.models import dual_encoder, lookup, published_model, published_tower
from scalingnote.models.card import CardFacts
from scalingnote.models.config import LookupConfig, Lora, Pretrained, TowerConfig
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.lookup import LookupStart
from scalingnote.models.lookup_table import frequent_features
from scalingnote.models.publish import split_reference, write_router

CLOSE = 1e-5
TABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weighting": "learned"},
    "attention": {"attention": True},
    "attention and weights": {"attention": True, "weighting": "learned"},
    "pairs and ends": {"weighting": "learned", "bigrams": 9, "ends": True},
}
LONG = "word tensors axis " * 40  # more tokens than the towers here read
ALL_QUERIES = [*QUERIES, LONG, "joins tensors along a new axis"]


def table(path: Path, *, storage: str = "float32", max_length: int = 9, **knobs: Any) -> Path:
    """Save a table with random weights, in which every option has an effect."""
    config = LookupConfig(max_length=max_length, storage=storage, **knobs)
    tokenizer = families.tokenizer().backend_tokenizer
    ids = [tokenizer.encode(query, add_special_tokens=False).ids for query in [*ALL_QUERIES, *ALL_QUERIES]]
    keys = frequent_features(ids, tokens=tokenizer.get_vocab_size(), bigrams=config.bigrams, ends=config.ends)
    tower = lookup.build(
        config, dim=HIDDEN, tokenizer_json=tokenizer.to_str(), seed=0, start=LookupStart(keys)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in tower.parameters():
            value.normal_(0.1, 0.3, generator=generator)
    tower.save(path)
    return path


def adopt(path: Path, role: published_model.Role, to: Path) -> Path:
    dual_encoder.load_tower(path, role).save(to)
    return to


def unit(vectors: ndarray) -> ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def documents(tower: Any) -> ndarray:
    columns = {"title": TITLES, "topic": [""] * len(TITLES), "content": CONTENTS}
    encoder = Encoder(tower, precision="float32")
    return encoder.encode_documents(pa.table(columns))["summary"]


def needs_our_code(path: Path) -> bool:
    return "scalingnote." in (path / "router_config.json").read_text()


def load(path: Path) -> SentenceTransformer:
    return SentenceTransformer(str(path), device="cpu", trust_remote_code=needs_our_code(path))


def check(path: Path, query: Path, document: Path) -> SentenceTransformer:
    """Compare both routes with our encoders of the towers, and with our encoders of the folder itself."""
    model = load(path)
    queries = model.encode_query(ALL_QUERIES)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, atol=CLOSE)
    for source in (query, path):
        encoder = QueryEncoder(source, precision="float32")
        np.testing.assert_allclose(queries, unit(encoder.encode_queries(ALL_QUERIES)), atol=CLOSE)
    expected = model.encode_document(TEXTS)
    for tower in (load_tower(document), dual_encoder.load_tower(path, "document")):
        np.testing.assert_allclose(expected, unit(documents(tower)), atol=CLOSE)
    np.testing.assert_array_equal(model.encode(TEXTS), expected)
    assert model.similarity_fn_name == "cosine"
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a teacher with prompts, a dense layer and normalisation."""
    return folder(tmp_path_factory.mktemp("teacher"), prompts=PROMPTS, dense=[(HIDDEN, True, nn.Tanh())])


@pytest.fixture(scope="module")
def teacher(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adopt(published, "document", tmp_path_factory.mktemp("document"))


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize("kind", ["plain", "weighted"])
def test_a_static_table_equals_static_embedding(kind: str, storage: str, teacher: Path, tmp_path: Path):
    query = table(tmp_path / "query", storage=storage, **TABLES[kind])
    write_router(query, teacher, tmp_path / "router")
    assert not needs_our_code(tmp_path / "router")
    model: Any = check(tmp_path / "router", query, teacher)
    assert type(model[0].sub_modules["query"][0]) is StaticEmbedding


@pytest.mark.parametrize("storage", ["float16", "int8"])
@pytest.mark.parametrize("kind", ["attention", "attention and weights", "pairs and ends"])
def test_other_tables_are_published_as_our_module(kind: str, storage: str, teacher: Path, tmp_path: Path):
    query = table(tmp_path / "query", storage=storage, **TABLES[kind])
    write_router(query, teacher, tmp_path / "router")
    assert needs_our_code(tmp_path / "router")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        SentenceTransformer(str(tmp_path / "router"), device="cpu")
    model: Any = check(tmp_path / "router", query, teacher)
    model.save(str(tmp_path / "again"), create_model_card=False)
    check(tmp_path / "again", query, teacher)


@pytest.mark.parametrize("kind", ["plain", "attention", "layers"])
def test_documents_can_be_encoded_by_reference(kind: str, published: Path, teacher: Path, tmp_path: Path):
    if kind == "layers":
        query = adopt(published, "query", tmp_path / "query")
    else:
        query = table(tmp_path / "query", **TABLES[kind])
    write_router(query, teacher, tmp_path / "router", document_reference=str(published))
    assert not [*(tmp_path / "router").glob("document_*/*.safetensors")]
    model: Any = check(tmp_path / "router", query, teacher)
    model.save(str(tmp_path / "again"), create_model_card=False)
    check(tmp_path / "again", query, teacher)
    assert model.get_embedding_dimension() == HIDDEN


def test_a_reference_may_name_a_revision(tmp_path: Path):
    assert split_reference("org/model@abc") == ("org/model", "abc")
    assert split_reference("org/model") == ("org/model", None)
    (tmp_path / "a@b").mkdir()
    assert split_reference(str(tmp_path / "a@b")) == (str(tmp_path / "a@b"), None)


def test_a_published_folder_can_be_the_teacher(published: Path, teacher: Path, tmp_path: Path):
    query = table(tmp_path / "query")
    write_router(query, published, tmp_path / "router")
    check(tmp_path / "router", query, teacher)
    # The document route of a router can be the teacher of another student.
    other = table(tmp_path / "other", **TABLES["weighted"])
    write_router(other, tmp_path / "router", tmp_path / "second")
    check(tmp_path / "second", other, teacher)


def test_trained_towers_can_be_routes(tmp_path: Path):
    base = families.folder(tmp_path / "base", "bert")
    for role in ("query", "document"):
        families.tower(base, role).save(tmp_path / role)
    write_router(tmp_path / "query", tmp_path / "document", tmp_path / "router")
    model = load(tmp_path / "router")
    ours = Encoder.load(tmp_path / "query", precision="float32").encode_queries(ALL_QUERIES)
    np.testing.assert_allclose(model.encode_query(ALL_QUERIES), unit(ours), atol=CLOSE)
    columns = pa.table({"title": [""] * 2, "topic": [""] * 2, "content": CONTENTS[:2]})
    embeddings = Encoder.load(tmp_path / "document", precision="float32").encode_documents(columns)["summary"]
    np.testing.assert_allclose(model.encode_document(CONTENTS[:2]), unit(embeddings), atol=CLOSE)
    assert "published_tower" not in (tmp_path / "router/README.md").read_text()


def test_truncated_embeddings_stay_truncated(tmp_path: Path):
    path = folder(tmp_path / "published", truncate_dim=8)
    lookup.build(LookupConfig(), dim=8, tokenizer_json=families.LEARNT, seed=0).save(tmp_path / "query")
    document = adopt(path, "document", tmp_path / "document")
    write_router(tmp_path / "query", document, tmp_path / "router")
    model = load(tmp_path / "router")
    assert model.encode_query(ALL_QUERIES).shape[1] == model.encode_document(TEXTS).shape[1] == 8
    actual = unit(model.encode_document(TEXTS))
    np.testing.assert_allclose(actual, unit(documents(load_tower(document))), atol=CLOSE)
    actual = unit(QueryEncoder(tmp_path / "router").encode_queries(ALL_QUERIES))
    np.testing.assert_allclose(model.encode_query(ALL_QUERIES), actual, atol=CLOSE)


def test_a_published_table_is_read_without_torch(teacher: Path, tmp_path: Path):
    for kind in ("weighted", "pairs and ends"):
        query = table(tmp_path / kind, **TABLES[kind])
        write_router(query, teacher, tmp_path / f"router {kind}")
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from scalingnote.encode.query_encoder import QueryEncoder\n"
            f"made = QueryEncoder(Path({str(tmp_path / f'router {kind}')!r}))\n"
            "made.encode_queries(['tensors'] * 20)\n"
            "print(made.form, sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
        )
        process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert process.stdout.strip() == "lookup []"


def static(path: Path, *more: nn.Module) -> Path:
    """Save a model with one table for both roles, like those of other authors."""
    tokenizer = Tokenizer.from_str(families.tokenizer().backend_tokenizer.to_str())
    rows = torch.randn(tokenizer.get_vocab_size(), 12, generator=torch.Generator().manual_seed(2))
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, rows), *more], device="cpu")
    model.save(str(path), create_model_card=False)
    return path


def test_tables_of_other_authors_are_read(tmp_path: Path):
    path = static(tmp_path, Dense(12, 5, activation_function=nn.Identity()), Normalize())
    queries = [query for query in ALL_QUERIES if query]
    actual = QueryEncoder(path).encode_queries(queries)
    library = SentenceTransformer(str(path), device="cpu")
    np.testing.assert_allclose(unit(actual), library.encode_query(queries), atol=CLOSE)


def test_tables_that_need_a_library_are_refused(tmp_path: Path):
    path = static(tmp_path / "tanh", Dense(12, 5))
    with pytest.raises(ConfigError, match="is not linear"):
        QueryEncoder(path)
    path = static(tmp_path / "prompt")
    edited(settings_of(path), prompts={"query": "ask: "})
    with pytest.raises(ConfigError, match="after the prompt 'ask: '"):
        QueryEncoder(path)
    path = static(tmp_path / "broken")
    (path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ArtifactError, match="cannot be read"):
        QueryEncoder(path)


def test_a_table_is_not_read_as_a_transformer(teacher: Path, tmp_path: Path):
    write_router(table(tmp_path / "query"), teacher, tmp_path / "router")
    with pytest.raises(ConfigError, match=r"query role of .* is a table .*scalingnote\.QueryEncoder"):
        published_model.read(tmp_path / "router", "query")
    assert published_model.read(tmp_path / "router", "document").prefix == PROMPTS["document"]


def test_only_the_routes_of_an_earlier_router_are_replaced(teacher: Path, tmp_path: Path):
    path = tmp_path / "router"
    write_router(table(tmp_path / "query", **TABLES["attention"]), teacher, path)
    (path / "LICENSE").write_text("mine")
    query = table(tmp_path / "other")
    write_router(query, teacher, path)
    assert sorted(route.name for route in path.glob("query_*")) == [
        "query_0_StaticEmbedding",
        "query_1_Dense",
    ]
    assert (path / "LICENSE").exists()
    check(path, query, teacher)
    with pytest.raises(ConfigError, match=r"holds another model \(modules\.json, config\.json"):
        write_router(query, teacher, shutil.copytree(teacher, tmp_path / "full"))


def test_towers_that_cannot_be_routes_are_refused(published: Path, teacher: Path, tmp_path: Path):
    query = table(tmp_path / "query")
    out = tmp_path / "router"
    lookup.build(LookupConfig(), dim=8, tokenizer_json=families.LEARNT, seed=0).save(tmp_path / "narrow")
    with pytest.raises(ConfigError, match="of 8 dimensions, the document tower of 32"):
        write_router(tmp_path / "narrow", teacher, out)
    with pytest.raises(ConfigError, match="holds a query tower, not a document tower"):
        write_router(query, query, out)
    with pytest.raises(ConfigError, match=r"no modules\.json"):
        write_router(query, families.folder(tmp_path / "plain", "bert"), out)
    config = TowerConfig(
        backbone=Pretrained(path=str(published)), pooling="auto", max_length=24, lora=Lora(rank=2)
    )
    adapter_tower = published_tower.build(config, role="document", dim=None)
    adapter_tower.save(tmp_path / "adapters", merge_adapters=False)
    with pytest.raises(ConfigError, match="holds only adapters"):
        write_router(query, tmp_path / "adapters", out)
    odd = shutil.copytree(published, tmp_path / "odd")
    modules = json.loads((odd / "modules.json").read_text())
    (odd / "modules.json").write_text(json.dumps([*modules, {"type": "modeling.Odd", "path": "9_Odd"}]))
    with pytest.raises(ConfigError, match=r"modeling\.Odd needs its own code"):
        write_router(query, odd, out)
    (odd / "modules.json").write_text(json.dumps([{**modules[0], "kwargs": ["task"]}, *modules[1:]]))
    with pytest.raises(ConfigError, match="takes task from `encode`"):
        write_router(query, odd, out)
    (odd / "modules.json").write_text(json.dumps(modules))
    (odd / "model.safetensors").rename(odd / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no safetensors"):
        write_router(query, odd, out)
    other = folder(tmp_path / "mean")
    with pytest.raises(ConfigError, match="without document_reference"):
        write_router(query, teacher, out, document_reference=str(other))
    assert not out.exists()


def test_a_reference_with_an_unsupported_module_is_refused(published: Path, tmp_path: Path):
    model = SentenceTransformer(str(published), device="cpu")
    model.insert(2, LayerNorm(HIDDEN))
    model.save(str(tmp_path / "odd"), create_model_card=False)
    query = table(tmp_path / "query")
    write_router(query, tmp_path / "odd", tmp_path / "router", document_reference=str(tmp_path / "odd"))
    actual = load(tmp_path / "router").encode_document(TEXTS)
    np.testing.assert_allclose(actual, model.encode_document(TEXTS), atol=CLOSE)
    with pytest.raises(ConfigError, match=r"LayerNorm of .* is not supported"):
        published_model.read(tmp_path / "router", "document")
    (tmp_path / "router/document_0_ReferencedModel/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no model"):
        published_model.read(tmp_path / "router", "document")


@pytest.mark.filterwarnings("ignore:.*:UserWarning:huggingface_hub")
def test_the_card_contains_known_facts(published: Path, tmp_path: Path):
    source = shutil.copytree(published, tmp_path / "teacher")
    (source / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Teacher\n")
    facts = CardFacts(
        base_model="org/teacher",
        lessons=40_000,
        made="Six passes over sentences of the corpus.",
        agreement={"mean cosine": 0.91},
    )
    write_router(table(tmp_path / "query"), source, tmp_path / "router", facts=facts)
    card = huggingface_hub.ModelCard.load(tmp_path / "router/README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", "en")
    assert (card.data.library_name, card.data.pipeline_tag) == (
        "sentence-transformers",
        "sentence-similarity",
    )
    assert card.data.base_model == ["org/teacher"]
    assert {"router", "asymmetric", "static-embeddings"} <= set(card.data.tags)
    for phrase in (
        "# router",
        "rows of 32 dimensions; no transformer runs",
        "`org/teacher`, which is copied",
        "40,000 texts",
        "Six passes",
        "| mean cosine | 0.9100 |",
        "| prompt | none | `text: ` |",
        "| tokens read | 9 | 24 |",
    ):
        assert phrase in re.sub(" +", " ", card.text), phrase


def test_the_card_leaves_out_unknown_facts(teacher: Path, tmp_path: Path):
    write_router(table(tmp_path / "query"), teacher, tmp_path / "router")
    card = (tmp_path / "router/README.md").read_text()
    for phrase in ("license", "language:", "base_model", "model-index", "None", "## Measured", "Lessons"):
        assert phrase not in card, phrase


@pytest.mark.parametrize("kind", ["plain", "attention"])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_code_of_a_card_runs(kind: str, by_name: bool, published: Path, teacher: Path, tmp_path: Path):
    path = tmp_path / "router"
    query = table(tmp_path / "query", **TABLES[kind])
    write_router(query, teacher, path, document_reference=str(published) if by_name else None)
    blocks = [block.split("```")[0] for block in (path / "README.md").read_text().split("```python\n")[1:]]
    assert len(blocks) == 3
    scope: dict[str, Any] = {"PATH": str(path)}
    for block in blocks:
        *setup, call = block.strip().splitlines()
        exec("\n".join(setup), scope)
        assert np.isfinite(np.asarray(eval(call, scope))).all()


@pytest.mark.parametrize("kind", ["plain", "pairs and ends"])
def test_the_hub_gets_both_routes_and_returns_the_student(
    kind: str, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    query = table(tmp_path / "query", **TABLES[kind])
    write_router(query, teacher, tmp_path / "router")
    hub, fetched = tmp_path / "hub", tmp_path / "fetched"

    def create(self: HfApi, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert (repo_id, private, exist_ok) == ("org/model", True, True)

    def upload(self: HfApi, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        shutil.copytree(folder_path, hub)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def snapshot(repo_id: str, *, revision: str, **patterns: list[str]) -> str:
        assert (repo_id, revision) == ("org/model", "v1")
        names = [str(path.relative_to(hub)) for path in hub.rglob("*") if path.is_file()]
        for name in huggingface_hub.utils.filter_repo_objects(names, **patterns):
            (fetched / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(hub / name, fetched / name)
        return str(fetched)

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    local = QueryEncoder.from_pretrained(tmp_path / "router")
    assert local.push_to_hub("org/model", private=True) == "https://hub/org/model/commit/1"
    again = QueryEncoder.from_pretrained("org/model", revision="v1")
    np.testing.assert_array_equal(again.encode(TEXTS), local.encode(TEXTS))
    assert not [*fetched.glob("document_*")]
    assert [*hub.glob("document_*")]
