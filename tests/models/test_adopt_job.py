"""A published model becomes a dual encoder, which later stages read like any other."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer

import tiny
from in_process import without_ray
from published import edited, folder, settings_of
from scalingnote.core.config import load
from scalingnote.core.errors import ConfigError
from scalingnote.encode import job as encode
from scalingnote.encode.config import EncodeConfig, Fleet
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.models import adopt, publish
from scalingnote.models.config import AdoptConfig
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.run import stages
from scalingnote.run.config import RunConfig
from scalingnote.storage import arrow

CONFIG = Path(__file__).parents[2] / "configs/quickstart/python_docs.yaml"
CLOSE = 1e-5


def dual_encoder(uri: str) -> Any:
    return DualEncoder.load(Path(uri))


def test_an_adopted_model_encodes_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = folder(tmp_path, prompts={"query": "find: ", "document": "text: "}, max_length=40)
    towers = adopt.run(AdoptConfig(path=str(path)), output=str(tmp_path / "towers"))
    weights = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert towers.manifest.info["weights_sha256"]["document"] == {"model.safetensors": weights}
    assert towers.counts["dimensions"] == 32

    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    config = EncodeConfig(dtype="float32", resources=Fleet(workers=1))
    embeddings = encode.run(
        config, dataset=dataset.uri, dual_encoder=towers.uri, output=str(tmp_path / "embeddings")
    )
    model = SentenceTransformer(str(path), device="cpu")
    texts = [f"{row['title']} {row['content']}" for row in tiny.document_rows()]
    actual = arrow.to_numpy(embeddings.table("embeddings")["summary"])
    np.testing.assert_allclose(actual, model.encode_document(texts), atol=CLOSE)

    queries = dataset.table("queries.parquet")["query"].to_pylist()[:8]
    encoder = QueryEncoder(towers.directory("query"), precision="float32")
    assert encoder.form == "torch"
    np.testing.assert_allclose(encoder.encode_queries(queries), model.encode_query(queries), atol=CLOSE)


def test_a_pair_has_two_models_of_equal_width(tmp_path: Path):
    small, wide = folder(tmp_path / "a"), folder(tmp_path / "b", pooling=["cls", "mean"])
    config = AdoptConfig(path=str(small), query_path=str(folder(tmp_path / "c", pooling="cls")))
    towers = dual_encoder(adopt.run(config, output=str(tmp_path / "pair")).uri)
    assert (towers.query.native.pooling, towers.document.native.pooling) == ("cls", "mean")
    config = AdoptConfig(path=str(small), query_path=str(wide))
    with pytest.raises(ConfigError, match="same dimensions"):
        adopt.run(config, output=str(tmp_path / "unequal"))


def test_the_config_overrides_the_files_of_a_model(tmp_path: Path):
    path = folder(tmp_path, prompts={"query": "", "document": "text: "}, max_length=40)
    config = AdoptConfig(
        path=str(path),
        pooling="cls",
        query_prefix="ask: ",
        document_prefix="find: ",
        query_max_length=8,
        document_max_length=9,
    )
    towers = adopt.run(config, output=str(tmp_path / "towers"))
    model = SentenceTransformer(str(path), device="cpu")
    model[1].pooling_mode = "cls"
    text = "a b c d e f g h i j k l m n o p"
    model.max_seq_length = 8
    actual = QueryEncoder(towers.directory("query"), precision="float32").encode_queries([text])[0]
    np.testing.assert_allclose(actual, model.encode(f"ask: {text}"), atol=CLOSE)
    model.max_seq_length = 9
    documents = pa.table({"title": ["a b"], "topic": [""], "content": [text]})
    actual = Encoder.load(towers.directory("document")).encode_documents(documents)["summary"][0]
    np.testing.assert_allclose(actual, model.encode(f"find: a b {text}"), atol=CLOSE)


@pytest.mark.parametrize(
    ("prompts", "prefix", "expected"),
    [
        ({"document": "", "passage": "p: "}, None, ["passage", "p: "]),
        ({"passage": "p: "}, None, ["passage", "p: "]),
        ({"passage": "p: "}, "p: ", []),
        ({"document": "d: ", "passage": "p: "}, None, []),
    ],
)
def test_an_unread_document_prompt_is_logged(
    tmp_path: Path, prompts: Any, prefix: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    path = folder(tmp_path)
    edited(settings_of(path), prompts=prompts)
    arguments: list[Any] = []
    monkeypatch.setattr(adopt.log, "warning", lambda text, *values: arguments.extend(values[1:]))
    tower: Any = adopt.open_tower(AdoptConfig(path=str(path), document_prefix=prefix), "document")
    adopt.open_tower(AdoptConfig(path=str(path), document_prefix=prefix), "query")
    assert arguments == expected
    assert tower.native.prefix == (prefix or prompts.get("document", ""))


def test_the_card_of_an_adopted_model_says_published(tmp_path: Path):
    config = AdoptConfig(path=str(folder(tmp_path)))
    towers = adopt.run(config, output=str(tmp_path / "towers"))
    query, document = sorted(publish.publish(towers, tmp_path / "cards"), reverse=True)
    card = (query / "README.md").read_text()
    assert "as published" in card
    assert 'model.encode_query(["how to join two tensors"])' in card
    assert "encode_document" in (document / "README.md").read_text()
    SentenceTransformer(str(query), device="cpu")


def test_adopt_replaces_training_in_a_run(tmp_path: Path):
    settings = [f"adopt.path={tmp_path}", "distill=null"]
    names = [stage.name for stage in stages.of(load(RunConfig, [CONFIG], settings))]
    assert names == ["prepare", "adopt", "encode", "quantize", "index", "evaluate"]
    names = [stage.name for stage in stages.of(load(RunConfig, [CONFIG], settings[:1]))]
    assert names[:5] == ["prepare", "planner", "collect", "adopt", "teacher"]
    with pytest.raises(ConfigError, match="adopt takes the place of stage I"):
        load(RunConfig, [CONFIG], [*settings, "rounds=2"])


def test_weights_with_another_checksum_are_refused(tmp_path: Path):
    path = folder(tmp_path)
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    adopt.run(AdoptConfig(path=str(path), weights_sha256=digest), output=str(tmp_path / "right"))
    with pytest.raises(ConfigError, match="fetch the model again"):
        adopt.run(AdoptConfig(path=str(path), weights_sha256="0" * 64), output=str(tmp_path / "wrong"))
    with pytest.raises(ConfigError, match="no installed Python package 'no_such_package'"):
        adopt.run(AdoptConfig(path="package:no_such_package"), output=str(tmp_path / "none"))
