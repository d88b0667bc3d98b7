"""The towers behind mteb's interface: by the interface alone, and through mteb's own search where it is."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer

import families
import published
import tiny
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError, DataError
from scalingnote.evaluate import mteb_model
from scalingnote.evaluate.measures import measure
from scalingnote.evaluate.mteb_model import MtebModel, MtebSearch, Prompts, prompt_name
from scalingnote.models import backbone, dual_encoder, lookup, published_tower
from scalingnote.models.batch import collate
from scalingnote.models.config import LookupConfig, TokenWiseConfig
from scalingnote.models.publish import write_router
from scalingnote.storage import arrow

DIM = 16
ROWS = tiny.document_rows(12)
CORPUS = [{"id": row["doc_id"], "title": row["title"], "text": row["content"]} for row in ROWS]
QUERIES = [{"id": f"q{i}", "text": row["title"]} for i, row in enumerate(ROWS[:4])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    tokenizer = backbone.train_tokenizer([" ".join(row.values()) for row in ROWS], vocabulary=300)
    for role, config in (("query", tiny.query_tower()), ("document", tiny.document_tower())):
        dual_encoder.build_tower(config, role=role, dim=DIM, tokenizer_json=tokenizer, seed=1).save(
            root / role
        )
    return {role: root / role for role in ("query", "document")}


@pytest.fixture(scope="module")
def model(folders) -> MtebModel:
    return MtebModel.load(folders["query"], folders["document"], name="ours/tiny")


def expected(folders) -> np.ndarray:
    """Cosines of the queries with the documents, by the encoders themselves."""
    table = pa.table(
        {"title": [r["title"] for r in CORPUS], "topic": [""] * 12, "content": [r["text"] for r in CORPUS]}
    )
    documents = Encoder.load(folders["document"]).encode_documents(table)["summary"]
    queries = QueryEncoder.load(folders["query"]).encode_queries([row["text"] for row in QUERIES])
    return arrow.l2_normalize(queries) @ arrow.l2_normalize(documents).T


def test_batches_go_through_the_tower_of_their_role(model, folders):
    titles, bodies = [r["title"] for r in CORPUS], [r["text"] for r in CORPUS]
    batches = [
        {"title": titles[i : i + 5], "body": bodies[i : i + 5], "text": ["unused"] * 5} for i in (0, 5, 10)
    ]
    documents = model.encode(
        batches, task_metadata=None, hf_split="test", hf_subset="en", prompt_type="document"
    )
    queries = model.encode([{"text": [row["text"] for row in QUERIES]}], prompt_type="query", batch_size=32)
    assert (documents.shape, queries.shape) == ((12, DIM), (4, DIM))
    scores = expected(folders)
    np.testing.assert_allclose(model.similarity(queries, documents), scores, atol=1e-5)
    np.testing.assert_allclose(model.similarity_pairwise(queries, documents[:4]), np.diag(scores), atol=1e-5)
    np.testing.assert_array_equal(
        model.encode([{"text": ["a query"]}]), model.encode([{"query": ["a query"]}])
    )
    assert model.encode([]).shape == (0, DIM)


def test_towers_of_different_widths_are_refused(folders):
    query, document = QueryEncoder.load(folders["query"]), Encoder.load(folders["document"])
    query.dim = 8
    with pytest.raises(ConfigError, match="gives 8 dimensions, the document tower 16"):
        MtebModel(query, document, name="ours/tiny")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mtebs_search_finds_what_exact_search_finds(model, folders):
    mteb = pytest.importorskip("mteb", reason="pip install scalingnote[mteb]")
    from mteb.models import SearchEncoderWrapper
    from mteb.models.models_protocols import EncoderProtocol

    import datasets

    assert isinstance(model, EncoderProtocol)
    assert model.mteb_model_meta.name == "ours/tiny"
    about = {"task_metadata": mteb.get_task("SciFact").metadata, "hf_split": "test", "hf_subset": "default"}
    knobs = {"encode_kwargs": {"batch_size": 5}, "num_proc": None}
    search = SearchEncoderWrapper(model)
    search.index(datasets.Dataset.from_list(CORPUS), **about, **knobs)
    found = search.search(datasets.Dataset.from_list(QUERIES), top_k=3, **about, **knobs)
    for row, query in zip(expected(folders), QUERIES, strict=True):
        best = np.argsort(-row)[:3]
        assert found[query["id"]] == pytest.approx({CORPUS[i]["id"]: row[i] for i in best.tolist()}, abs=1e-5)


@dataclass
class Task:
    """What is read of mteb's TaskMetadata."""

    name: str = "SciFact"
    type: str = "Retrieval"
    prompt: object = None


@pytest.mark.filterwarnings("ignore")
def test_prompts_are_found_by_mtebs_names_and_in_its_order():
    names = ["SciFact-query", "SciFact", "Retrieval-query", "Retrieval", "query"]
    for first, name in enumerate(names):
        assert prompt_name(names[first:], Task(), "query") == name
    assert prompt_name(names[:1], Task(), "document") is None
    assert prompt_name(["document"], Task(), "document") == "document"
    assert prompt_name(["STS"], Task(type="STS"), None) == "STS"
    assert prompt_name(names, None, "query") == "query"
    resolve = pytest.importorskip("mteb.models.abs_encoder").get_prompt_name
    kinds = pytest.importorskip("mteb.types").PromptType
    for first in range(len(names) + 1):
        own = dict.fromkeys(names[first:], "text")
        for role in (*kinds, None):
            value = None if role is None else role.value
            assert prompt_name(own, Task(), value) == resolve(own, Task(), role)


def test_a_template_puts_mtebs_own_instruction_before_queries():
    prompts = Prompts({"Quora": "same: "}, "Instruct: {instruction}\nQuery: ")
    task = Task(prompt={"query": "Find {it}", "document": "not read"})
    assert prompts.prefix(task, "query") == "Instruct: Find {it}\nQuery: "
    assert prompts.prefix(Task(prompt="Find"), None) == "Instruct: Find\nQuery: "
    assert prompts.prefix(task, "document") is None
    assert prompts.prefix(Task(), "query") is None
    assert prompts.prefix(Task(name="Quora", prompt="Find"), "query") == "same: "


def test_towers_read_the_prompt_of_a_task(tmp_path):
    folder = published.folder(tmp_path, prompts=published.PROMPTS, max_length=40)
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    settings["prompts"] |= {"SciFact": "claim: ", "Retrieval-document": "passage: "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    library = SentenceTransformer(str(folder), device="cpu")
    texts = [row["text"] for row in QUERIES]

    def cosines(model: MtebModel, task: Task, role: str, prompt: str) -> np.ndarray:
        found = model.encode([{"text": texts}], task_metadata=task, prompt_type=role)
        return (found * library.encode(texts, prompt=prompt, normalize_embeddings=True)).sum(1)

    named = MtebModel.load(folder)
    for task, role, prompt in (
        (Task(), "query", "claim: "),
        (Task(name="other"), "query", "find: "),
        (Task(name="other"), "document", "passage: "),
        (Task(name="other", type="STS"), "document", "text: "),
    ):
        np.testing.assert_allclose(cosines(named, task, role, prompt), 1, atol=1e-5)
    assert named._about["use_instructions"]
    given = MtebModel.load(folder, prompts={"query": "ask "}, template="Do {instruction}: ")
    np.testing.assert_allclose(cosines(given, Task(prompt="it"), "query", "ask "), 1, atol=1e-5)
    given = MtebModel.load(folder, prompts={}, template="Do {instruction}: ")
    np.testing.assert_allclose(cosines(given, Task(prompt="it"), "query", "Do it: "), 1, atol=1e-5)
    with pytest.raises(ConfigError, match="put it where mteb"):
        MtebModel.load(folder, template="Query: ")


def test_a_token_wise_tower_has_a_table_for_each_task_and_tables_read_no_prompt(folders, tmp_path):
    learnt = backbone.train_tokenizer([" ".join(row.values()) for row in ROWS], vocabulary=400)
    config = TokenWiseConfig(backbone=tiny.CAUSAL, max_length=16, tasks={"SciFact": "Given a claim: "})
    made = dual_encoder.build_query_tower(config, dim=DIM, tokenizer_json=learnt, seed=0)
    made.save(tmp_path / "query")
    model = MtebModel.load(tmp_path / "query", folders["document"])
    texts = [row["text"] for row in QUERIES]
    for task, instruction in ((Task(), "Given a claim: "), (Task(name="other"), config.instruction)):
        expected = made.lookup(instruction)
        rows = expected(collate(expected.prompt.rows(texts), pad=0))[:, 0]
        found = model.encode([{"text": texts}], task_metadata=task, prompt_type="query")
        np.testing.assert_allclose(found, arrow.l2_normalize(rows.detach().numpy()), atol=2e-3)
    assert model._about["use_instructions"]
    with pytest.raises(ConfigError, match="which reads no prompt"):
        MtebModel.load(tmp_path / "query", folders["document"], template="Do {instruction}: ")


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Path:
    """A published model with prompts and a table beside it, in one folder."""
    root = tmp_path_factory.mktemp("router")
    teacher = published.folder(root / "teacher", prompts=published.PROMPTS, max_length=40)
    published_tower.open_published(teacher, "document").save(root / "document")
    tokens = families.tokenizer().backend_tokenizer.to_str()
    made = lookup.build(LookupConfig(), dim=published.HIDDEN, tokenizer_json=tokens, seed=0)
    made.save(root / "query")
    write_router(root / "query", root / "document", root / "ours")
    return root / "ours"


@pytest.fixture(scope="module")
def beir(tmp_path_factory) -> Path:
    """A folder in the BEIR layout; of each query two documents are relevant, one of them more."""
    folder = tmp_path_factory.mktemp("beir") / "tiny"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": row["id"], "title": row["title"], "text": row["text"]} for row in CORPUS]
    queries = [{"_id": row["id"], "text": row["text"]} for row in QUERIES]
    for name, rows in (("corpus", corpus), ("queries", [*queries, {"_id": "other", "text": "not asked"}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = [
        f"{q['id']}\t{CORPUS[(i + j) % 12]['id']}\t{2 - j}\n" for i, q in enumerate(QUERIES) for j in (0, 1)
    ]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    return folder


def own_ndcg(router: Path) -> float:
    """nDCG@10 of the folder's two sides, by our measures."""
    table = pa.table(
        {"title": [r["title"] for r in CORPUS], "topic": [""] * 12, "content": [r["text"] for r in CORPUS]}
    )
    encoder = Encoder(published_tower.open_published(router, "document"))
    queries = QueryEncoder.load(router).encode_queries([row["text"] for row in QUERIES])
    scores = arrow.l2_normalize(queries) @ arrow.l2_normalize(encoder.encode_documents(table)["summary"]).T
    rankings = {
        query["id"]: [CORPUS[i]["id"] for i in np.argsort(-row)]
        for query, row in zip(QUERIES, scores, strict=True)
    }
    grades = {q["id"]: {CORPUS[i]["id"]: 2, CORPUS[i + 1]["id"]: 1} for i, q in enumerate(QUERIES)}
    return measure(rankings, grades)["nDCG@10"]


@pytest.mark.filterwarnings("ignore")
def test_mteb_evaluates_a_router_folder_on_a_beir_folder(router, beir, tmp_path):
    mteb = pytest.importorskip("mteb", reason="pip install scalingnote[mteb]")
    task = mteb_model.beir_task(beir)
    model = MtebModel.load(router)
    (found,) = mteb_model.evaluate(model, [task], to=tmp_path).values()
    assert found["ndcg_at_10"] == pytest.approx(own_ndcg(router), abs=1e-5)
    # The library that the folder is published for gives the same, through mteb's own wrapper.
    library = mteb.evaluate(
        SentenceTransformer(str(router), device="cpu"), mteb_model.beir_task(beir), cache=None
    )
    assert library.task_results[0].scores["test"][0]["ndcg_at_10"] == pytest.approx(
        found["ndcg_at_10"], abs=1e-5
    )
    (results,) = tmp_path.rglob("tiny.json")
    assert json.loads(results.read_text())["scores"]["test"][0]["ndcg_at_10"] == found["ndcg_at_10"]
    about = json.loads((results.parent / "model_meta.json").read_text())
    assert (about["name"], about["model_type"]) == ("scalingnote/ours", ["router"])
    assert (about["n_active_parameters_override"], about["embed_dim"]) == (0, published.HIDDEN)
    assert (about["max_tokens"], about["use_instructions"]) == (40, True)
    table = families.tokenizer().backend_tokenizer.get_vocab_size() * published.HIDDEN
    assert about["n_parameters"] > about["n_embedding_parameters"] > table
    assert about["revision"] == MtebModel.load(router).mteb_model_meta.revision != "local"


@dataclass(frozen=True)
class Hit:
    doc_id: str
    score: float


class Shared:
    """A searcher and a query path: documents that share most words with the query."""

    def __call__(self, queries):
        return [SimpleNamespace(embedding=query, terms=None) for query in queries]

    def search(self, query, terms, *, k):
        scores = {row["id"]: float(len({*query.split()} & {*row["title"].split()})) for row in CORPUS}
        best = sorted(scores, key=lambda doc: (-scores[doc], doc))[:k]
        return [[Hit(doc, scores[doc]) for doc in best]]


@pytest.mark.filterwarnings("ignore")
def test_mteb_evaluates_a_search_that_ranks_by_itself(beir, tmp_path, monkeypatch):
    pytest.importorskip("mteb", reason="pip install scalingnote[mteb]")
    monkeypatch.setattr(mteb_model, "QUERIES_PER_BLOCK", 3)
    about = {"name": "ours/search", "revision": "1", "embed_dim": None, "languages": None, "license": None}
    about |= dict.fromkeys(("n_parameters", "memory_usage_mb", "max_tokens", "use_instructions"))
    doc_ids = [row["id"] for row in CORPUS]
    model = MtebSearch(Shared(), Shared(), doc_ids, about={**about, "framework": ["NumPy"]})
    (found,) = mteb_model.evaluate(model, [mteb_model.beir_task(beir)], to=tmp_path).values()
    assert found["mrr_at_1"] >= 0.75  # a query is the title of its document
    assert model.mteb_model_meta.model_type == ["hybrid"]
    hits = model.search({"id": ["q1"], "text": [QUERIES[1]["text"]]}, top_k=2)
    assert next(iter(hits["q1"])) == CORPUS[1]["id"]
    with pytest.raises(DataError, match="the task has 11 documents, the run indexed 12; 1 are in one"):
        model.index({"id": doc_ids[1:]})
    with pytest.raises(ConfigError, match="re-ranking tasks need MtebModel"):
        model.search({"id": [], "text": []}, top_k=2, top_ranked={})
