"""A published model becomes a dual encoder, and the stages after it read it like any other."""

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


def test_documents_and_queries_are_encoded_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = folder(tmp_path, prompts={"query": "find: ", "document": "text: "}, max_length=40)
    towers = adopt.run(AdoptConfig(path=str(path)), output=str(tmp_path / "towers"))
    weights = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert towers.manifest.info["weights_sha256"]["document"] == {"model.safetensors": weights}
    assert towers.counts["dimensions"] == 32

    without_ray(monkeypatch)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    config = EncodeConfig(dtype="float32", resources=Fleet(workers=1))
    found = encode.run(
        config, dataset=dataset.uri, dual_encoder=towers.uri, output=str(tmp_path / "embeddings")
    )
    model = SentenceTransformer(str(path), device="cpu")
    texts = [f"{row['title']} {row['content']}" for row in tiny.document_rows()]
    embedded = arrow.to_numpy(found.table("embeddings")["summary"])
    np.testing.assert_allclose(embedded, model.encode_document(texts), atol=CLOSE)

    queries = dataset.table("queries.parquet")["query"].to_pylist()[:8]
    encoder = QueryEncoder(towers.directory("query"), precision="float32")
    assert encoder.form == "torch"
    np.testing.assert_allclose(encoder.encode_queries(queries), model.encode_query(queries), atol=CLOSE)


def test_a_pair_has_two_models_of_one_width(tmp_path: Path):
    small, wide = folder(tmp_path / "a"), folder(tmp_path / "b", pooling=["cls", "mean"])
    config = AdoptConfig(path=str(small), query_path=str(folder(tmp_path / "c", pooling="cls")))
    made = dual_encoder(adopt.run(config, output=str(tmp_path / "pair")).uri)
    assert (made.query.native.pooling, made.document.native.pooling) == ("cls", "mean")
    config = AdoptConfig(path=str(small), query_path=str(wide))
    with pytest.raises(ConfigError, match="same dimensions"):
        adopt.run(config, output=str(tmp_path / "unequal"))


def test_the_config_says_what_the_files_do_not(tmp_path: Path):
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
    found = QueryEncoder(towers.directory("query"), precision="float32").encode_queries([text])[0]
    np.testing.assert_allclose(found, model.encode(f"ask: {text}"), atol=CLOSE)
    model.max_seq_length = 9
    documents = pa.table({"title": ["a b"], "topic": [""], "content": [text]})
    found = Encoder.load(towers.directory("document")).encode_documents(documents)["summary"][0]
    np.testing.assert_allclose(found, model.encode(f"find: a b {text}"), atol=CLOSE)


@pytest.mark.parametrize(
    ("prompts", "prefix", "warned"),
    [
        ({"document": "", "passage": "p: "}, None, ["passage", "p: "]),
        ({"passage": "p: "}, None, ["passage", "p: "]),
        ({"passage": "p: "}, "p: ", []),
        ({"document": "d: ", "passage": "p: "}, None, []),
    ],
)
def test_a_prompt_of_documents_that_is_not_read_is_named(
    tmp_path: Path, prompts: Any, prefix: str | None, warned: list[str], monkeypatch: pytest.MonkeyPatch
):
    path = folder(tmp_path)
    edited(settings_of(path), prompts=prompts)
    said: list[Any] = []
    monkeypatch.setattr(adopt.log, "warning", lambda text, *values: said.extend(values[1:]))
    made: Any = adopt.open_tower(AdoptConfig(path=str(path), document_prefix=prefix), "document")
    adopt.open_tower(AdoptConfig(path=str(path), document_prefix=prefix), "query")
    assert said == warned
    assert made.native.prefix == (prefix or prompts.get("document", ""))


def test_a_card_says_that_nothing_was_trained(tmp_path: Path):
    config = AdoptConfig(path=str(folder(tmp_path)))
    towers = adopt.run(config, output=str(tmp_path / "towers"))
    query, document = sorted(publish.publish(towers, tmp_path / "cards"), reverse=True)
    card = (query / "README.md").read_text()
    assert "as published" in card
    assert 'model.encode_query(["how to join two tensors"])' in card
    assert "encode_document" in (document / "README.md").read_text()
    SentenceTransformer(str(query), device="cpu")


def test_adopt_takes_the_place_of_training(tmp_path: Path):
    adopted = [f"adopt.path={tmp_path}", "distill=null"]
    names = [stage.name for stage in stages.of(load(RunConfig, [CONFIG], adopted))]
    assert names == ["prepare", "adopt", "encode", "quantize", "index", "evaluate"]
    names = [stage.name for stage in stages.of(load(RunConfig, [CONFIG], adopted[:1]))]
    assert names[:5] == ["prepare", "planner", "collect", "adopt", "teacher"]
    with pytest.raises(ConfigError, match="adopt takes the place of stage I"):
        load(RunConfig, [CONFIG], [*adopted, "rounds=2"])


def test_only_the_weights_that_were_named_are_taken(tmp_path: Path):
    path = folder(tmp_path)
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    adopt.run(AdoptConfig(path=str(path), weights_sha256=digest), output=str(tmp_path / "right"))
    with pytest.raises(ConfigError, match="fetch the model again"):
        adopt.run(AdoptConfig(path=str(path), weights_sha256="0" * 64), output=str(tmp_path / "wrong"))
    with pytest.raises(ConfigError, match="no installed Python package 'no_such_package'"):
        adopt.run(AdoptConfig(path="package:no_such_package"), output=str(tmp_path / "none"))
