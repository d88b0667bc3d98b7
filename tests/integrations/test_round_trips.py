"""Classes for frameworks are written, read, copied and compared like the frameworks do, without their key."""

import copy
import importlib.util
import json
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.integrations.client import Client, client

# The frameworks are not imported here: both test processes collect this file, but only one runs it.
for framework in ("langchain_core", "llama_index", "haystack"):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed", allow_module_level=True)

KEY = "a-key-of-sixteen-or-more"
URL = "http://one:8000"
VARIABLE = "SCALINGNOTE_API_KEY"
Calls = list[tuple[str, str | None, str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Replace servers by answers without a network, and record the calls: server, key, path, body."""
    requests: Calls = []

    def answer(self: Client, path: str, body: dict[str, Any] | None = None) -> Any:
        requests.append((self._url, self._key, path, body))
        if path == "/info":
            return {"model_id": f"model of {self._url}"}
        if path == "/search":
            return {"results": []}
        assert body is not None
        value = "AACAPw==" if "one" in self._url else "AAAAQA=="  # 1 and 2 as float32
        return {"data": [{"embedding": value} for _ in body["input"]]}

    client.cache_clear()  # clients cache the models of their servers
    monkeypatch.setattr(Client, "_call", answer)
    yield requests
    client.cache_clear()


# --- Haystack ---------------------------------------------------------------------------------------------


def haystack_components(key: Any) -> list[Any]:
    from scalingnote.integrations import haystack

    return [
        haystack.ScalingNoteTextEmbedder(URL, key, "a-model"),
        haystack.ScalingNoteDocumentEmbedder(URL, key),
        haystack.ScalingNoteRetriever(URL, 3, key),
    ]


@pytest.mark.parametrize("number", range(3))
def test_a_pipeline_is_written_and_read_with_the_name_of_its_key(number, monkeypatch):
    from haystack import Pipeline
    from haystack.utils import Secret

    monkeypatch.setenv(VARIABLE, KEY)
    component = haystack_components(Secret.from_env_var(VARIABLE))[number]
    pipeline = Pipeline()
    pipeline.add_component("ours", component)
    text = pipeline.dumps()
    assert VARIABLE in text
    assert KEY not in text
    again = Pipeline.loads(text, allowed_modules=["scalingnote.*"])
    assert again.dumps() == text
    loaded = again.get_component("ours")
    assert (type(loaded), loaded.to_dict()) == (type(component), component.to_dict())
    assert loaded.api_key == Secret.from_env_var(VARIABLE)
    assert type(component).from_dict(component.to_dict()).to_dict() == component.to_dict()


def test_a_token_as_key_is_not_written():
    from haystack.utils import Secret

    for component in haystack_components(Secret.from_token(KEY)):
        assert KEY not in repr(component)
        with pytest.raises(ValueError, match="Cannot serialize token-based secret"):
            component.to_dict()


def test_haystack_components_refuse_a_key_in_plain_text():
    from haystack import Pipeline

    with pytest.raises(
        ConfigError, match=r"not a str: give Secret\.from_env_var\('SCALINGNOTE_API_KEY'\)"
    ) as error:
        haystack_components(KEY)
    assert KEY not in str(error.value)
    pipeline = Pipeline()
    pipeline.add_component("ours", haystack_components(None)[0])
    text = pipeline.dumps().replace("api_key: null", f"api_key: {KEY}")
    with pytest.raises(Exception, match=r"Secret\.from_token"):
        Pipeline.loads(text, allowed_modules=["scalingnote.*"])


def test_haystack_components_read_the_key_at_each_call(calls, monkeypatch):
    from haystack.utils import Secret

    embedder = haystack_components(Secret.from_env_var(VARIABLE))[0]
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=VARIABLE):
        embedder.run("zo")
    assert not calls
    for key in ("first", "second"):
        monkeypatch.setenv(VARIABLE, key)
        assert embedder.run("zo") == {"embedding": [1.0]}
    assert [(key, body["model"]) for _, key, _, body in calls] == [
        ("first", "a-model"),
        ("second", "a-model"),
    ]


# --- LlamaIndex -------------------------------------------------------------------------------------------


def test_llama_index_reads_the_embedding_that_it_wrote(calls):
    from scalingnote.integrations.llama_index import ScalingNoteEmbedding

    embedding = ScalingNoteEmbedding(f"{URL}/", api_key=KEY, model="a-model", embed_batch_size=7)
    data = embedding.to_dict()
    assert (data["class_name"], data["url"], data["model"]) == ("ScalingNoteEmbedding", URL, "a-model")
    assert KEY not in embedding.to_json() + repr(embedding) + str(embedding) + str(embedding.to_payload())
    bare = ScalingNoteEmbedding.from_dict(data)
    assert bare.to_dict() == data
    assert bare.api_key is None
    for again in (
        ScalingNoteEmbedding.from_dict(data, api_key=KEY),
        ScalingNoteEmbedding.from_json(embedding.to_json(), api_key=KEY),
        pickle.loads(pickle.dumps(embedding)),
        copy.deepcopy(embedding),
    ):
        assert (again.to_dict(), again.api_key) == (data, embedding.api_key)
        assert again.get_query_embedding("zo") == [1.0]
        assert calls[-1][:2] == (URL, KEY)
        assert calls[-1][3]["model"] == "a-model"


def test_a_llama_index_cache_distinguishes_servers_and_models(calls):
    from llama_index.core.ingestion import IngestionCache, IngestionPipeline
    from llama_index.core.ingestion.pipeline import get_transformation_hash
    from llama_index.core.schema import TextNode

    from scalingnote.integrations.llama_index import ScalingNoteEmbedding

    nodes = [TextNode(text="zo", id_="1")]

    def code(url: str, **more: Any) -> str:
        return get_transformation_hash(nodes, ScalingNoteEmbedding(url, **more))

    assert code(URL) == code(f"{URL}/", api_key=KEY)
    assert len({code(URL), code("http://two:8000"), code(URL, model="a"), code(URL, model="b")}) == 4
    cache = IngestionCache()
    for url, expected in ((URL, 1.0), ("http://two:8000", 2.0), (URL, 1.0)):
        pipeline = IngestionPipeline(transformations=[ScalingNoteEmbedding(url)], cache=cache)
        assert pipeline.run(nodes=copy.deepcopy(nodes))[0].embedding == [expected]
    assert (
        len([path for _, _, path, _ in calls if path == "/v1/embeddings"]) == 2
    )  # the third embedding is from the cache


def test_a_cache_that_mixes_sides_is_refused():
    from llama_index.core.storage.kvstore import SimpleKVStore

    from scalingnote.integrations.llama_index import ScalingNoteEmbedding

    with pytest.raises(ConfigError, match="embeddings_cache has one embedding per text"):
        ScalingNoteEmbedding(URL, embeddings_cache=SimpleKVStore())


def test_a_llama_index_retriever_is_copied_with_its_arguments(calls):
    from scalingnote.integrations.llama_index import ScalingNoteRetriever

    retriever = ScalingNoteRetriever(URL, k=3, filter={"topic": "a"}, api_key=KEY)
    assert KEY not in repr(retriever) + str(vars(retriever))
    for again in (pickle.loads(pickle.dumps(retriever)), copy.deepcopy(retriever)):
        assert again.retrieve("zo") == []
        body = {"query": "zo", "k": 3, "filter": {"topic": "a"}}
        assert calls[-1] == (URL, KEY, "/search", body)


# --- LangChain --------------------------------------------------------------------------------------------


def langchain_classes() -> list[Any]:
    from scalingnote.integrations.langchain import ScalingNoteEmbeddings, ScalingNoteRetriever

    return [
        ScalingNoteEmbeddings(URL, api_key=KEY, model="a-model"),
        ScalingNoteRetriever(url=URL, k=3, filter={"topic": "a"}, api_key=KEY),
    ]


def load(text: str, original: Any, **knobs: Any) -> Any:
    from langchain_core.load import loads

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LangChain warns that `loads` is in beta
        return loads(text, allowed_objects=[type(original)], valid_namespaces=["scalingnote"], **knobs)


@pytest.mark.parametrize("number", range(2))
def test_langchain_gets_the_key_from_its_secrets(number, monkeypatch):
    from langchain_core.load import dumps

    original = langchain_classes()[number]
    text = dumps(original)
    assert KEY not in text + repr(original) + str(original)
    assert json.loads(text)["kwargs"]["api_key"]["id"] == [VARIABLE]
    assert load(text, original, secrets_map={VARIABLE: KEY}) == original
    assert load(text, original).api_key is None
    monkeypatch.setenv(VARIABLE, KEY)
    assert load(text, original, secrets_from_env=True) == original
    again = load(text, original, secrets_map={VARIABLE: KEY})
    assert dumps(again) == text
    assert pickle.loads(pickle.dumps(original)) == copy.deepcopy(original) == original


def test_copies_with_other_arguments_call_the_other_server(calls):
    from langchain_core.runnables import ConfigurableField

    embeddings, retriever = langchain_classes()
    assert embeddings.embed_query("zo") == [1.0]
    other = {"url": "http://two:8000"}
    assert embeddings.model_copy(update=other).embed_query("zo") == [2.0]
    retriever.model_copy(update=other).invoke("zo")
    assert calls[-1][:2] == ("http://two:8000", KEY)
    configurable = retriever.configurable_fields(k=ConfigurableField(id="k"))
    configurable.invoke("zo", config={"configurable": {"k": 5}})
    assert calls[-1] == (URL, KEY, "/search", {"query": "zo", "k": 5, "filter": {"topic": "a"}})


# --- all --------------------------------------------------------------------------------------------------


def test_arguments_that_do_not_exist_are_refused():
    from scalingnote.integrations import langchain, llama_index

    for make in (
        lambda: langchain.ScalingNoteEmbeddings(URL, apikey=KEY),
        lambda: langchain.ScalingNoteRetriever(url=URL, top_k=3),
        lambda: llama_index.ScalingNoteEmbedding(URL, apikey=KEY),
        lambda: llama_index.ScalingNoteRetriever(URL, top_k=3),
    ):
        with pytest.raises((TypeError, ValueError), match=r"apikey|top_k"):
            make()


@pytest.mark.parametrize(
    "wrong",
    ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://[host", "http://host?key=1", ""],
)
def test_each_class_refuses_an_invalid_address(wrong):
    from scalingnote.integrations import haystack, langchain, llama_index

    for make in (
        haystack.ScalingNoteTextEmbedder,
        haystack.ScalingNoteRetriever,
        langchain.ScalingNoteEmbeddings,
        lambda url: langchain.ScalingNoteRetriever(url=url),
        llama_index.ScalingNoteEmbedding,
        llama_index.ScalingNoteRetriever,
    ):
        with pytest.raises(SearchError, match="is not the address of a server"):
            make(wrong)


def test_secrets_are_not_shown_in_errors():
    with pytest.raises(SearchError, match="give the key as api_key") as error:
        Client("http://me:secret@host:8000")
    assert "secret" not in str(error.value)
    for key in (f"{KEY}\n", f"{KEY}é"):
        with pytest.raises(SearchError, match="headers cannot have") as error:
            Client(URL, api_key=key)
        assert KEY not in str(error.value)


def test_a_changed_model_of_the_server_is_read_again(monkeypatch):
    models, requested = ["old", "new"], []

    def answer(self: Client, path: str, body: dict[str, Any] | None = None) -> Any:
        if body is None:
            return {"model_id": models[0]}
        requested.append(body["model"])
        if body["model"] != models[0]:
            raise SearchError("no such model")
        return {"data": [{"embedding": "AACAPw=="}]}

    monkeypatch.setattr(Client, "_call", answer)
    server = Client(URL)
    server.embed(["zo"], "query")
    server.embed(["zo"], "query")
    del models[0]
    with pytest.raises(SearchError, match="no such model"):
        server.embed(["zo"], "query")
    assert server.embed(["zo"], "query") == [[1.0]]
    assert requested == ["old", "old", "old", "new"]
