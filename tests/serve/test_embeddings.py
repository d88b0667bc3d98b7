"""Embeddings in the forms of OpenAI and TEI: equal to those of our encoders, with limits and refusals."""

import asyncio
import base64
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gateway_here import Client, Reranker
from numpy import ndarray
from sentence_transformers import SentenceTransformer
from torch import nn

import families
import published
from scalingnote.api import QueryEncoder
from scalingnote.core.errors import ConfigError
from scalingnote.models import dual_encoder, lookup
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup_table import Table
from scalingnote.models.publish import write_router
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.run.service_config import AppArgs, ServeConfig
from scalingnote.serve import api, artifacts, towers
from scalingnote.serve.access import RefusedError
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.embeddings import EmbeddingList, EmbeddingService, OpenAIRefusal, TeiSparseRequest
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts
from scalingnote.serve.encoders import Reranker as Reranking
from scalingnote.serve.messages import Refusal
from scalingnote.serve.towers import DocumentTower

NAME = "small-tower"
TEXTS = ["join tensors", "tensors", "", "arrays along a new axis"]


def router(path: Path) -> Path:
    """Write a router like `scalingnote distill`: a random table for queries, a transformer for documents."""
    dense = [(published.HIDDEN, True, nn.Tanh())]
    teacher = published.folder(path / "teacher", prompts=published.PROMPTS, dense=dense)
    dual_encoder.load_tower(teacher, "document").save(path / "document")
    tokenizer = families.tokenizer().backend_tokenizer
    table = lookup.build(
        LookupConfig(max_length=64), dim=published.HIDDEN, tokenizer_json=tokenizer.to_str(), seed=0
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in table.parameters():
            value.normal_(0.1, 0.3, generator=generator)
    table.save(path / "query")
    write_router(path / "query", path / "document", path / NAME)
    return path / NAME


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return router(tmp_path_factory.mktemp("router"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    config = ServeConfig(rerank="a fake")
    served = artifacts.find(AppArgs(model=str(folder), serve=config))
    embeddings = EmbeddingService(replace(towers_of(served), reranker=LocalHandle(Reranker())), config)
    http_client = Client(api.build(embeddings, config))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MAX_TEXTS", 200), ("MAX_TEXT_CHARS", 400), ("MAX_RERANKED", 3)):
            patch.setattr(f"scalingnote.serve.embeddings.{name}", value)
        yield http_client
    http_client.close()


def towers_of(served: Any) -> Deployed:
    """Load both towers of a model in this process."""
    assert isinstance(served, artifacts.ServedTower)
    assert served.query is not None
    assert served.document is not None
    arm = replace(served.query, encoder=LocalHandle(ArmEncoder(served.query.encoder)))
    documents = LocalHandle(DocumentTower(served.document))
    return Deployed([arm], documents=documents, name=served.name, similarity=served.similarity)


@pytest.fixture(scope="module")
def dot_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a published model with embeddings of different lengths."""
    path = published.folder(tmp_path_factory.mktemp("dot"), pooling="mean_sqrt_len_tokens", normalise=False)
    settings = path / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"similarity_fn_name": "dot"}))
    return path


def test_embeddings_of_a_dot_model_keep_their_length(dot_model: Path):
    served = artifacts.find(AppArgs(model=str(dot_model), serve=ServeConfig(query_form="torch")))
    assert served.similarity == "dot"
    embeddings = EmbeddingService(towers_of(served), served.config)
    library = SentenceTransformer(str(dot_model), device="cpu")
    with closing(Client(api.build(embeddings, served.config))) as client:

        def vectors(path: str, **body: Any) -> ndarray:
            answer = client("POST", path, json=body).json()
            rows = answer if path == "/embed" else [row["embedding"] for row in answer["data"]]
            return np.array(rows)

        for role, encode in (("query", library.encode_query), ("document", library.encode_document)):
            uncut, options = encode(TEXTS), {"model": served.name, "input": TEXTS, "input_type": role}
            assert np.ptp(np.linalg.norm(uncut, axis=1)) > 1
            np.testing.assert_allclose(vectors("/v1/embeddings", **options), uncut, atol=1e-4)
            cut = vectors("/v1/embeddings", **options, dimensions=8)
            np.testing.assert_allclose(cut, uncut[:, :8], atol=1e-4)
            body_of_tei = {"inputs": TEXTS, "prompt_name": role}
            np.testing.assert_allclose(vectors("/embed", **body_of_tei), uncut, atol=1e-4)
            unit = vectors("/embed", **body_of_tei, normalize=True)
            np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)
        comparison = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
        scores = client("POST", "/similarity", json=comparison).json()
        expected = library.similarity(library.encode_query(TEXTS[:1]), library.encode_document(TEXTS))
        np.testing.assert_allclose(scores, expected[0], rtol=1e-4)


@pytest.fixture(scope="module")
def as_query(folder: Path) -> Any:
    return QueryEncoder(folder).encode


@pytest.fixture(scope="module")
def as_document(folder: Path) -> Any:
    encode = towers.document_encoder(folder)

    def unit(texts: list[str]) -> ndarray:
        vectors = encode.encode(texts)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return unit


def openai(client: Client, texts: Any, **more: Any) -> ndarray:
    answer = client("POST", "/v1/embeddings", json={"model": NAME, "input": texts, **more}).json()
    EmbeddingList.model_validate(answer)
    assert [row["index"] for row in answer["data"]] == [*range(len(answer["data"]))]
    return np.asarray([row["embedding"] for row in answer["data"]])


def test_both_sides_of_a_model_answer_in_both_forms(client, as_query, as_document):
    for options in ({}, {"input_type": "query"}, {"input_type": "search_query"}, {"model": f"{NAME}-query"}):
        np.testing.assert_allclose(openai(client, TEXTS, **options), as_query(TEXTS), atol=1e-6)
    for options in ({"input_type": "passage"}, {"input_type": "document"}, {"model": f"{NAME}-document"}):
        np.testing.assert_allclose(openai(client, TEXTS, **options), as_document(TEXTS), atol=1e-6)
    np.testing.assert_allclose(openai(client, "tensors", user="me")[0], as_query("tensors")[0], atol=1e-6)
    of_tei = client("POST", "/embed", json={"inputs": TEXTS, "truncate": True}).json()
    np.testing.assert_allclose(of_tei, as_query(TEXTS), atol=1e-6)
    of_tei = client("POST", "/embed", json={"inputs": TEXTS, "prompt_name": "document"}).json()
    np.testing.assert_allclose(of_tei, as_document(TEXTS), atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"dimensions": 8}])
def test_base64_has_every_bit_of_a_float32(client, more):
    coded = {"model": NAME, "input": TEXTS, "encoding_format": "base64", **more}
    rows = client("POST", "/v1/embeddings", json=coded).json()["data"]
    vectors = np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows])
    np.testing.assert_array_equal(vectors, openai(client, TEXTS, **more).astype(np.float32))


def test_fewer_dimensions_are_the_first_at_length_one(client, as_query):
    uncut = as_query(TEXTS)[:, :8]
    cut = uncut / np.linalg.norm(uncut, axis=1, keepdims=True)
    np.testing.assert_allclose(openai(client, TEXTS, dimensions=8), cut, atol=1e-6)
    of_tei = client("POST", "/embed", json={"inputs": TEXTS, "dimensions": 8}).json()
    np.testing.assert_allclose(of_tei, cut, atol=1e-6)


def test_tei_keeps_lengths_without_normalize(client, folder, as_query):
    raw = np.asarray(client("POST", "/embed", json={"inputs": TEXTS, "normalize": False}).json())
    np.testing.assert_allclose(raw, QueryEncoder(folder).encode(TEXTS, normalize=False), atol=1e-6)
    assert not np.allclose(raw, as_query(TEXTS))


def test_tokens_and_counts_are_those_of_the_tower(client, as_query):
    (tokens,) = client("POST", "/tokenize", json={"inputs": "join tensors"}).json()
    plain = [token for token in tokens if not token["special"]]
    assert "".join("join tensors"[token["start"] : token["stop"]] for token in plain) == "join tensors"
    ids = [token["id"] for token in plain]
    answer = client("POST", "/v1/embeddings", json={"model": NAME, "input": ids}).json()
    counts = {"prompt_tokens": len(ids), "total_tokens": len(ids), "cut_texts": 0, "lost_tokens": 0}
    assert answer["usage"] == counts
    long = client("POST", "/v1/embeddings", json={"model": NAME, "input": ["join " * 75, "join"]}).json()
    usage = long["usage"]
    assert usage["cut_texts"] == 1
    assert 0 < usage["lost_tokens"] < usage["prompt_tokens"]
    headers = client("POST", "/embed", json={"inputs": ["join " * 75, "join"]}).headers
    names = ("x-compute-tokens", "x-cut-texts", "x-lost-tokens")
    read = usage["prompt_tokens"] - usage["lost_tokens"]
    assert [int(headers[name]) for name in names] == [read, 1, usage["lost_tokens"]]
    np.testing.assert_allclose(answer["data"][0]["embedding"], as_query("join tensors")[0], atol=1e-6)
    assert openai(client, [ids, ids[:1]]).shape[0] == 2
    documents = {"inputs": ["join"], "prompt_name": "document", "add_special_tokens": True}
    (tokens,) = client("POST", "/tokenize", json=documents).json()
    assert tokens[0]["special"]
    assert tokens[-1]["special"]


def test_token_ids_give_the_embedding_of_their_text(client, as_query, as_document):
    text = "arrays along a new axis"
    (tokens,) = client("POST", "/tokenize", json={"inputs": text, "prompt_name": "document"}).json()
    all_ids = [token["id"] for token in tokens]  # with the special tokens of the document side
    bare_ids = [token["id"] for token in tokens if not token["special"]]
    assert all_ids != bare_ids
    for ids in (all_ids, bare_ids):
        np.testing.assert_allclose(openai(client, [ids, ids])[1], as_query(text)[0], atol=1e-6)
        embedding = openai(client, ids, input_type="document")
        np.testing.assert_allclose(embedding, as_document([text]), atol=1e-6)


def test_token_ids_of_another_tokenizer_are_refused(client):
    """Even ids below the size of the vocabulary are refused, because their embedding would be noise."""
    vocabulary = families.tokenizer().get_vocab()
    parts = [
        (vocabulary[token[:1]], vocabulary[token[1:]])
        for token in vocabulary
        if {token[:1], token[1:]} <= vocabulary.keys()
    ]
    assert parts
    for ids in ([*parts[0]], [10**5]):
        answer = client("POST", "/v1/embeddings", json={"model": NAME, "input": ids})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input"
        assert "check_embedding_ctx_length=False" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("row", "again", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], True),
        ([], [], True),
        ([1, 2, 3], [1, 23], False),
        ([1, 2, 3], [1, 2, 3, 4], False),
        ([99, *range(40), 98], [7, 8, *range(40), 9], True),  # cut within the first and the last word
        ([*range(20), 77, *range(20, 40)], [*range(20), 7, 8, *range(20, 40)], False),
    ],
)
def test_a_cut_word_may_have_other_tokens_at_the_ends(row, again, expected):
    assert towers._tokenizes_to(row, again) is expected


def test_a_long_text_is_refused_only_without_truncation(client, as_query):
    long = "join tensors " * 20
    texts = ["join", long]
    for prompt in ("query", "document"):
        cut = client("POST", "/embed", json={"inputs": texts, "prompt_name": prompt, "truncate": None})
        assert cut.status_code == 200
        body = {"inputs": texts, "prompt_name": prompt, "truncate": False}
        refused = client("POST", "/embed", json=body)
        assert refused.status_code == 413  # the status of TEI
        error = refused.json()["error"]
        assert (error["code"], error["field"]) == ("too_long", "inputs")
        assert "text 1 must have at most" in error["message"]
        assert client("POST", "/embed", json={**body, "inputs": ["x"] * 100 + [long]}).status_code == 413
        assert client("POST", "/embed", json={**body, "inputs": "join"}).status_code == 200
    inputs = {"source_sentence": "join", "sentences": [long]}
    one = {"inputs": inputs, "parameters": {"truncate": False}}
    assert client("POST", "/similarity", json=one).status_code == 413
    # OpenAI's form has no such option: texts are cut.
    np.testing.assert_allclose(openai(client, long)[0], as_query(long)[0], atol=1e-6)


@pytest.mark.parametrize("others", [0, 50], ids=["one text", "many texts"])
@pytest.mark.parametrize("side", ["query", "document"])
def test_truncation_direction_sets_the_side_that_is_read(client, side, others):
    def embedded(text: str, **options: Any) -> ndarray:
        body = {"inputs": [text, *["short"] * others], "prompt_name": side, **options}
        rows = client("POST", "/embed", json=body).json()
        for row in rows[1:]:
            np.testing.assert_allclose(row, short, atol=1e-6)
        return np.asarray(rows[0])

    def tokens(text: str) -> int:
        body = {"inputs": text, "prompt_name": side, "add_special_tokens": False}
        return len(client("POST", "/tokenize", json=body).json()[0])

    (short,) = client("POST", "/embed", json={"inputs": "short", "prompt_name": side}).json()
    refused = client("POST", "/embed", json={"inputs": "join " * 75, "prompt_name": side, "truncate": False})
    most = int(re.search(r"at most (\d+) tokens", refused.text)[1])
    end, start = "new axis", "join"
    while tokens(end) < most:
        end += " a"
    while tokens(start) < most:
        start += " o"
    assert tokens(end) == tokens(start) == most
    long_text = f"{start} and some more {end}"
    for direction in ("Left", "left"):
        np.testing.assert_allclose(
            embedded(long_text, truncation_direction=direction), embedded(end), atol=1e-6
        )
    for options in (
        {"truncation_direction": "Right"},
        {"truncation_direction": None},
        {"truncate": True},
        {},
    ):
        np.testing.assert_allclose(embedded(long_text, **options), embedded(start), atol=1e-6)
    for options in ({"truncation_direction": "Left"}, {"truncation_direction": "Right"}):
        np.testing.assert_allclose(embedded("join", **options), embedded("join"), atol=1e-6)
    assert not np.allclose(embedded(end), embedded(start), atol=1e-2)
    inputs = {"source_sentence": long_text, "sentences": [end, start]}
    parameters = {"truncation_direction": "Left", "prompt_name": side}
    cosines = client("POST", "/similarity", json={"inputs": inputs, "parameters": parameters}).json()
    assert cosines[0] == pytest.approx(1, abs=1e-5)
    assert cosines[1] < 0.999


def test_terms_of_the_end_of_a_query_are_refused(folder):
    encoder = ArmEncoder(QueryPathParts((str(folder), towers.FOLDER)))
    tokenizer = families.tokenizer().backend_tokenizer
    for analysis in ("tokenizer", "words"):
        sparse = SparseQuery(tokenizer, max_length=4, weighting="counts", analysis=analysis)
        encoder._path = replace(encoder._path, sparse=sparse)
        arm = ServedArm("m", LocalHandle(encoder), "torch", personalised=False)
        served = EmbeddingService(Deployed([arm], name="m"), ServeConfig())
        for options in ({"truncate": False}, {"truncation_direction": "Left"}):
            request = TeiSparseRequest(inputs=["a", "join tensors " * 4], **options)
            with pytest.raises(RefusedError, match="text 1 must have at most 4 tokens") as refused:
                asyncio.run(served.embed_sparse(request))
            assert refused.value.status == 413
            assert len(asyncio.run(served.embed_sparse(TeiSparseRequest(inputs="a", **options)))) == 1
        for options in ({}, {"truncation_direction": "Right"}):
            assert asyncio.run(served.embed_sparse(TeiSparseRequest(inputs="join tensors " * 4, **options)))


def test_a_reranker_refuses_to_cut_the_other_side(tmp_path):
    from sentence_transformers import CrossEncoder

    base = families.folder(tmp_path / "base", "bert")
    cross_encoder = CrossEncoder(str(base), num_labels=1, max_length=24, device="cpu")
    cross_encoder.save_pretrained(str(tmp_path / "cross"))
    reranker = Reranking(str(tmp_path / "cross"))

    def logits(text: str, **options: Any) -> Any:
        return asyncio.run(reranker.logits("join", ["tensors", text], **options))

    assert all(len(logits("arrays", **options)) == 2 for options in ({"truncate": False}, {"keeps": "right"}))
    assert logits("arrays " * 30) == logits("arrays " * 30, keeps="left")
    for options in ({"truncate": False}, {"keeps": "right"}):
        refused = logits("arrays " * 30, **options)
        assert isinstance(refused, towers.Refused)
        assert refused.too_long
        assert "text 1 must have at most 24 tokens" in refused.reason


HUB_ID, COMMIT = "acme/tiny-embed", "5c38ec7c405ec4b44b94cc5a9bb96e735b38267a"


@pytest.fixture(scope="module")
def cached(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of HUB_ID in a cache of the hub."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--acme--tiny-embed"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        yield repository / "snapshots" / COMMIT


def test_the_name_of_a_model_depends_on_its_argument(folder, cached, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "tiny_embed_package" / "model")
    (tmp_path / "tiny_embed_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(folder.parent)
    package = "package:tiny_embed_package"
    names = {HUB_ID: HUB_ID, package: package, str(folder): NAME, f"./{NAME}/": NAME, str(cached): HUB_ID}
    for model, name in names.items():
        served = artifacts.find(AppArgs(model=model))
        assert isinstance(served, artifacts.ServedTower)
        assert served.name == name, model


def test_a_model_of_the_hub_has_its_id_as_name(cached, as_query):
    config = ServeConfig()
    served = artifacts.find(AppArgs(model=HUB_ID, serve=config))
    client = Client(api.build(EmbeddingService(towers_of(served), config), config))
    assert client("GET", "/info").json()["model_id"] == HUB_ID
    names = [model["id"] for model in client("GET", "/v1/models").json()["data"]]
    assert names == [HUB_ID, f"{HUB_ID}-document", f"{HUB_ID}-query"]
    for name in names:
        for path in (name, name.replace("/", "%2F")):
            assert client("GET", f"/v1/models/{path}").json()["id"] == name
        answer = client("POST", "/v1/embeddings", json={"model": name, "input": "tensors"}).json()
        assert answer["model"] == name
        near = np.asarray(answer["data"][0]["embedding"]) @ as_query(["tensors"])[0]
        assert (near > 0.9999) == (name != f"{HUB_ID}-document")
    refused = client("POST", "/v1/embeddings", json={"model": COMMIT, "input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    client.close()


def test_rerank_and_similarity_return_scores(client, as_query, as_document):
    body = {"query": "tensors", "texts": ["tensor", "tensors of rank", "a"], "return_text": True}
    ranks = client("POST", "/rerank", json=body).json()
    assert [(rank["index"], rank["text"]) for rank in ranks] == [
        (2, "a"),
        (0, "tensor"),
        (1, body["texts"][1]),
    ]
    assert all(0 < rank["score"] < 1 for rank in ranks)
    raw = client("POST", "/rerank", json={**body, "raw_scores": True, "return_text": False}).json()
    assert [(rank["index"], rank["score"]) for rank in raw] == [(2, 6), (0, 1), (1, -8)]
    inputs = {"source_sentence": "tensors", "sentences": TEXTS}
    cosines = client("POST", "/similarity", json={"inputs": inputs}).json()
    np.testing.assert_allclose(cosines, as_document(TEXTS) @ as_query("tensors")[0], atol=1e-6)
    both = client("POST", "/similarity", json={"inputs": inputs, "parameters": {"prompt_name": "query"}})
    np.testing.assert_allclose(both.json(), as_query(TEXTS) @ as_query("tensors")[0], atol=1e-6)


def test_a_model_without_an_index_describes_itself(client):
    names = [model["id"] for model in client("GET", "/v1/models").json()["data"]]
    assert names == [NAME, f"{NAME}-document", f"{NAME}-query"]
    assert client("GET", f"/v1/models/{NAME}").json()["object"] == "model"
    info = client("GET", "/info").json()
    assert (info["model_id"], info["dim"], info["max_client_batch_size"]) == (NAME, 32, 200)
    assert client("GET", "/health").json()["status"] == "ok"
    paths = client("GET", "/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/v1/models", "/embed", "/embed_sparse", "/rerank", "/tokenize"} <= paths.keys()
    assert "/search" not in paths
    assert client("POST", "/search", json={"query": "x"}).status_code == 404


OPENAI, ONE, FEW = "/v1/embeddings", {"inputs": "x"}, {"query": "x", "texts": ["y"]}
REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    (OPENAI, {"model": "another"}, 404, "model"),
    (OPENAI, {"input": []}, 400, "input"),
    (OPENAI, {"input": ["x"] * 201}, 400, "input"),
    (OPENAI, {"input": ["x" * 401]}, 400, "input"),
    (OPENAI, {"input": [10**6]}, 400, "input"),
    (OPENAI, {"input": {"a": 1}}, 400, "input"),
    (OPENAI, {"dimensions": 33}, 400, "dimensions"),
    (OPENAI, {"dimensions": 0}, 400, "dimensions"),
    (OPENAI, {"encoding_format": "int8"}, 400, "encoding_format"),
    (OPENAI, {"input_type": "image"}, 400, "input_type"),
    (OPENAI, {"input_type": "document", "model": f"{NAME}-query"}, 400, "input_type"),
    # Unknown fields, which would be ignored.
    (OPENAI, {"truncate_prompt_tokens": 3}, 400, "truncate_prompt_tokens"),
    (OPENAI, {"user": 7}, 400, "user"),
    ("/embed", ONE | {"truncation_direction": "Middle"}, 422, "truncation_direction"),
    ("/embed", ONE | {"input_type": "document"}, 422, "input_type"),
    ("/embed_sparse", ONE | {"normalize": True}, 422, "normalize"),
    ("/tokenize", ONE | {"truncate": True}, 422, "truncate"),
    ("/rerank", FEW | {"top_n": 1}, 422, "top_n"),
    ("/similarity", {"inputs": {"source_sentence": "x", "sentences": ["y"], "z": 1}}, 422, "inputs.z"),
    ("/embed_sparse", ONE, 409, None),
    ("/embed_sparse", ONE | {"prompt_name": "document"}, 409, None),
    ("/rerank", FEW | {"texts": ["y"] * 4}, 422, "texts"),
    ("/embed", {"inputs": ["x"] * 201}, 422, "inputs"),
    ("/embed", ONE | {"prompt_name": "image"}, 422, "prompt_name"),
    ("/tokenize", {"inputs": "x" * 401}, 422, "inputs"),
]


@pytest.mark.parametrize(("path", "body", "status", "field"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_refusal_has_the_field_in_the_form_of_its_path(client, path, body, status, field):
    answer = client("POST", path, json={"model": NAME, "input": "x"} | body if path == OPENAI else body)
    assert answer.status_code == status
    if path == OPENAI:
        refused = OpenAIRefusal.model_validate(answer.json(), extra="forbid").error
        assert refused.type == "invalid_request_error"
        assert refused.param == field or (refused.param or "").startswith(f"{field}.")
    else:
        assert Refusal.model_validate(answer.json(), extra="forbid").error.field == field


def test_a_tower_of_one_side_is_served(folder, tmp_path):
    query = folder.parent / "query"
    assert towers.sides(query) == {"query": query}
    assert towers.sides(folder.parent).keys() == {"query", "document"}
    assert isinstance(Table.read(query).tokenizer_json, str)
    served = artifacts.find(AppArgs(model=str(query)))
    assert isinstance(served, artifacts.ServedTower)
    assert served.document is None
    with pytest.raises(ConfigError, match="holds no tower"):
        artifacts.find(AppArgs(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"serve\.grpc_port needs an index"):
        artifacts.find(AppArgs(model=str(folder), serve=ServeConfig(grpc_port=9, allow_unauthenticated=True)))
