"""Common clients with a running server: they receive the embeddings of our encoders."""

import asyncio
import importlib.util
import socket
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pair
import pytest
import uvicorn
from gateway_here import service
from numpy import ndarray
from pair import DIM

from scalingnote.core.errors import SearchError
from scalingnote.encode.encoder import Encoder
from scalingnote.run.service_config import ServeConfig
from scalingnote.serve import api
from scalingnote.serve.access import Admission
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.towers import DocumentTower, document_encoder
from scalingnote.storage.artifact import Artifact

# The clients are not imported here: both test processes collect this file, and only one of them runs it.
for client in ("openai", "langchain_core", "llama_index", "haystack"):
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed", allow_module_level=True)

KEY = "a-key-of-sixteen-or-more"
MODEL = "scalingnote"
ROOT = Path(__file__).parents[2]
TEXTS = ["bakoli menura", "zo", "sitave ba ko"]


@pytest.fixture(scope="module")
def document_tower(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return pair.document_tower(f"{tmp_path_factory.mktemp('document')}/tower")


@pytest.fixture(scope="module")
def url(index: Artifact, query_tower: Artifact, document_tower: Artifact) -> Iterator[str]:
    """Yield the URL of a gateway with keys and both towers; test_served_index tests one in Ray Serve."""
    config = ServeConfig(deadline_s=20)
    documents = LocalHandle(DocumentTower((document_tower.uri, "dual_encoder")))
    admission = Admission(config.limits, frozenset([sha256(KEY.encode()).digest()]))
    application = api.build(
        service(index, query_tower, config, documents=documents), config, admission=admission
    )
    server = uvicorn.Server(uvicorn.Config(application, port=0, ws="none", log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"  # early connections wait until it is up
        server.should_exit = True
        thread.join()


def unit(vectors: ndarray) -> ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def sides(query_tower: Artifact, document_tower: Artifact) -> dict[str, Any]:
    """Return functions that compute unit embeddings by our encoders."""
    encoder = Encoder.load(query_tower.directory("query"))
    as_document = document_encoder(document_tower.directory("document")).encode
    return {
        "query": lambda texts: unit(encoder.encode_queries(texts)),
        "document": lambda texts: unit(as_document(texts)),
    }


def test_the_openai_client_works_with_its_default_settings(url, sides):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    assert {model.id for model in client.models.list()} >= {MODEL, f"{MODEL}-document"}
    for name, side in ((MODEL, "query"), (f"{MODEL}-query", "query"), (f"{MODEL}-document", "document")):
        answer = client.embeddings.create(model=name, input=TEXTS)  # requests base64
        embeddings = np.asarray([row.embedding for row in answer.data])
        np.testing.assert_allclose(embeddings, sides[side](TEXTS), atol=1e-6)
        assert answer.usage.total_tokens > len(TEXTS)
    answer_by_side = client.embeddings.create(
        model=MODEL, input="zo", encoding_format="float", extra_body={"input_type": "document"}
    )
    np.testing.assert_allclose(answer_by_side.data[0].embedding, sides["document"](["zo"])[0], atol=1e-6)
    with pytest.raises(openai.NotFoundError, match="there are"):
        client.embeddings.create(model="another", input="zo")
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MODEL, input="zo", dimensions=DIM + 1)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list()


def test_a_request_may_have_two_thousand_texts(url, sides):
    import openai

    texts = [f"bakoli {number}" for number in range(2048)]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    rows = client.embeddings.create(model=MODEL, input=texts).data
    embeddings = np.asarray([rows[n].embedding for n in (0, 1000, 2047)])
    np.testing.assert_allclose(embeddings, sides["query"]([texts[n] for n in (0, 1000, 2047)]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="up to 2048"):
        client.embeddings.create(model=MODEL, input=[*texts, "more"])


def test_langchain_uses_the_right_side(url, sides):
    from scalingnote.integrations.langchain import ScalingNoteEmbeddings, ScalingNoteRetriever

    embeddings = ScalingNoteEmbeddings(url, api_key=KEY)
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), sides["document"](TEXTS), atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), sides["query"](TEXTS)[0], atol=1e-6)
    of_async = asyncio.run(embeddings.aembed_query(TEXTS[0]))
    np.testing.assert_allclose(of_async, sides["query"](TEXTS)[0], atol=1e-6)
    topic = {"topic": "topic 3"}
    results = ScalingNoteRetriever(url=url, k=4, filter=topic, api_key=KEY).invoke(TEXTS[0])
    assert [document.metadata["topic"] for document in results] == ["topic 3"] * 4
    assert results[0].page_content.startswith(results[0].metadata["title"])


def test_llama_index_uses_the_right_side(url, sides):
    from scalingnote.integrations.llama_index import ScalingNoteEmbedding, ScalingNoteRetriever

    embedding = ScalingNoteEmbedding(url, api_key=KEY)
    vectors = embedding.get_text_embedding_batch(TEXTS)
    np.testing.assert_allclose(vectors, sides["document"](TEXTS), atol=1e-6)
    vectors = asyncio.run(embedding.aget_text_embedding_batch(TEXTS))
    np.testing.assert_allclose(vectors, sides["document"](TEXTS), atol=1e-6)
    np.testing.assert_allclose(embedding.get_query_embedding(TEXTS[0]), sides["query"](TEXTS)[0], atol=1e-6)
    retriever = ScalingNoteRetriever(url, k=4, filter={"topic": "topic 3"}, api_key=KEY)
    nodes = retriever.retrieve(TEXTS[0])
    assert asyncio.run(retriever.aretrieve(TEXTS[0])) == nodes
    assert [node.metadata["topic"] for node in nodes] == ["topic 3"] * 4
    assert [node.score for node in nodes] == sorted((node.score for node in nodes), reverse=True)


def test_haystack_uses_the_right_side(url, sides):
    from haystack import Document
    from haystack.utils import Secret

    from scalingnote.integrations.haystack import (
        ScalingNoteDocumentEmbedder,
        ScalingNoteRetriever,
        ScalingNoteTextEmbedder,
    )

    key = Secret.from_token(KEY)
    documents = [Document(content=text) for text in TEXTS]
    embedded = ScalingNoteDocumentEmbedder(url, key).run(documents)["documents"]
    np.testing.assert_allclose([each.embedding for each in embedded], sides["document"](TEXTS), atol=1e-6)
    query = ScalingNoteTextEmbedder(url, key).run(TEXTS[0])["embedding"]
    np.testing.assert_allclose(query, sides["query"](TEXTS)[0], atol=1e-6)
    hits = ScalingNoteRetriever(url, 4, key).run(TEXTS[0], filters={"topic": "topic 3"})["documents"]
    assert [hit.meta["topic"] for hit in hits] == ["topic 3"] * 4


@pytest.mark.parametrize("name", ["langchain", "llama_index", "haystack"])
def test_examples_run(name, url, capsys):
    example(name).main(url, KEY)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("own texts: ")


def test_a_client_gets_the_reason_of_a_refusal(url):
    from scalingnote.integrations.client import Client

    with pytest.raises(SearchError, match=r"refuses with 401.*API key"):
        Client(url).search("zo", k=1)
    with pytest.raises(SearchError, match=r"refuses with 422.*'k' is|refuses with 422.*k is"):
        Client(url, api_key=KEY).search("zo", k=10_000)


def example(name: str) -> ModuleType:
    path = ROOT / "examples" / f"{name}_search.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
