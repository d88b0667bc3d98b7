"""What features add to plain embeddings: an ablation of fusion on real products, with simulated users.

    python -m benchmarks.fusion --json docs/results/fusion.json [--steps N] [--max-documents N] [--seeds N]

Products, their suppliers, prices and dates, queries and judgements are those of `chorus_icecat`. Users are
simulated (`datasets/taste.py`): each likes some suppliers and a price band, and clicks other products less.

The plain embedding sums a pretrained model's token embeddings (pip install 'scalingnote[bench]'): made in
seconds, with a lookup table as its query tower. It and the semantic IDs are made once, clicks and fusion anew
for every seed.
After training, users whose clicks are known ask again: queries that training met, and (`new`) those of the
test split, which it did not, nor the products that are relevant to them:

- nDCG@10 over all products that people judged for any query: of the others nobody knows whether they are
  relevant. The gain of one is its grade over the best, times what the user's taste leaves of it
- AUC: in further simulated sessions, a click against what was not clicked

Each row of the table adds to the one above it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from safetensors import torch as safetensors
from scipy import sparse
from tokenizers import Tokenizer

from benchmarks import minilm
from benchmarks.report import arguments, show, write
from scalingnote import cluster
from scalingnote.config import Config, validate
from scalingnote.datasets import click_model
from scalingnote.datasets.config import AnyClickModel, ChorusIcecat
from scalingnote.datasets.job import run as prepare
from scalingnote.datasets.taste import Tastes
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.fuse import prepare as prepared
from scalingnote.fuse.batching import ClickBatches
from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.document_fusion import DocumentFusion
from scalingnote.fuse.features import User
from scalingnote.fuse.job import QueryParts, build, read_queries
from scalingnote.fuse.parts import Corpus, read_part
from scalingnote.fuse.query_fusion import QueryFusion
from scalingnote.log import configure
from scalingnote.models import lookup
from scalingnote.planner.config import Statistics
from scalingnote.planner.job import run as plan
from scalingnote.planner.planner import load as load_planner
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.quantize.job import run as quantize
from scalingnote.storage import trec, vectors
from scalingnote.storage.artifact import Artifact, Draft, write_table
from scalingnote.storage.slices import slices
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.loop import fit
from scalingnote.train.order import Order
from scalingnote.train.prepare import array
from scalingnote.train.strategies import engine
from scalingnote.train.stream import Store

DIM = 128
CLICKS: dict[str, Any] = {
    "users": 300,
    "sessions_per_query": 300,
    "relevant_per_session": 6,
    "taste": {"columns": ["supplier", "price"], "values": 8, "strength": 0.8, "told": 0.7},
}
FEATURES = [
    {"kind": "categorical", "column": "supplier"},
    {"kind": "bucketed", "column": "price"},
    {"kind": "numeric", "column": "price"},
    {"kind": "numeric", "column": "date_released"},
]
PROFILE = [{"kind": "categorical", "column": f"liked_{name}"} for name in ("supplier", "price")]
NOTHING = {"planner": None, "history": None}
# Each row has all that the one above it has.
ROWS: dict[str, dict[str, Any]] = {
    "semantic_ids": {"document": {"ids": None}, "query": NOTHING},
    "features": {"document": {"features": FEATURES}, "query": {"history": None}},
    "profile": {
        "document": {"features": FEATURES},
        "query": {"history": None, "profile": PROFILE, "crosses": ["liked_supplier", "liked_price"]},
    },
    "history": {
        "document": {"features": FEATURES},
        "query": {"profile": PROFILE, "crosses": ["liked_supplier", "liked_price"]},
    },
}
SHOWN = {"plain": "plain embedding", **{name: f"+ {name.replace('_', ' ')}" for name in ROWS}}
SHOWN["history"] = "+ user history"
SHOWN_MEASURES = {
    "nDCG@10": "ndcg10",
    "AUC": "auc",
    "nDCG@10, new queries": "ndcg10_new",
    "AUC, new queries": "auc_new",
}


class Plain(Config):
    """What the artifacts of the plain embedding were made by."""

    dim: int = DIM


@dataclass(frozen=True)
class World:
    """What one seed's users do, and how good an answer to each is."""

    dataset: Artifact
    queries: list[str]
    new: Bool[ndarray, " pairs"]  # the query is one of the test split
    asked: list[int]  # a query for each pair
    users: list[User]  # who asks it
    gains: Float[ndarray, "pairs docs"]
    judged: Bool[ndarray, " docs"]
    sessions: pa.Table  # impressions of the pairs' queries and users, simulated
    pair_of: dict[tuple[str, str], int]


def main() -> None:
    """Parse arguments, run, print and write."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of fusion, default: %(default)s")
    parser.add_argument("--max-documents", type=int, default=None, help="default: all 19,406")
    parser.add_argument("--users-per-query", type=int, default=20, help="who ask each test query")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--run-dir", default="runs/fusion", help="of what is shared by the seeds")
    options = parser.parse_args()
    configure()
    built = shared(options)
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for name, measures in one_seed(seed, built, options).items():
            found.setdefault(name, []).append(measures)
        table = [{"embedding": SHOWN[name], **shown(rows)} for name, rows in found.items()]
        write(options.json, metrics=metrics(found), table=table, seeds=found)  # kept as it comes
    show(f"chorus_icecat, simulated users, {options.seeds} seeds", table)


def shared(options: Any) -> dict[str, Artifact]:
    """Plain embeddings, semantic IDs and what they rest on, made once."""
    source = dataset_config(options, CLICKS)
    dataset = prepare(source, output=f"{options.run_dir}/dataset")
    cluster.connect()
    planner = plan(Statistics(), dataset=dataset.uri, output=f"{options.run_dir}/planner")
    towers, embeddings = static(dataset, options.run_dir)
    ids = quantize(
        QuantizeConfig(codes=64), embeddings=embeddings.uri, output=f"{options.run_dir}/semantic_ids"
    )
    found = (dataset, planner, towers, embeddings, ids)
    return {artifact.manifest.kind: artifact for artifact in found}


def static(dataset: Artifact, folder: str) -> tuple[Artifact, Artifact]:
    """A lookup query tower and embeddings of titles, both from a pretrained model's table of tokens.

    Rows are MiniLM's input embeddings times idf, brought to DIM by the principal directions of the titles'
    embeddings; a title is the sum of its tokens' rows by 1 + log tf, at unit length.
    """
    parts = dataset.names("documents/", ".parquet")
    path = minilm.path()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    titles = {part: dataset.table(part, ["title"])["title"].to_pylist() for part in parts}
    counts = {part: term_counts(found, tokenizer) for part, found in titles.items()}
    whole = sparse.vstack(list(counts.values())).tocsr()
    idf = np.log(whole.shape[0] / np.maximum((whole > 0).sum(axis=0).A1, 1))
    weights = safetensors.load_file(path / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
    wide = weights[name].float().numpy()[: len(idf)] * idf[:, None]
    matrix = vectors.unit(np.asarray(whole @ wide, np.float32))
    directions = np.linalg.svd(np.cov(matrix.T))[2][:DIM]
    rows = np.ascontiguousarray(wide @ directions.T, np.float32)

    parents = {"dataset": dataset}
    draft = Draft(f"{folder}/dual_encoder", kind="dual_encoder", config=Plain(), parents=parents)
    if not draft.finished:
        table = lookup.from_table(rows, tokenizer, max_length=32, storage="float32")
        table.save(Path(draft.path("query")))
    towers = draft.existing() if draft.finished else draft.commit(counts={"tokens": len(rows)})
    parents |= {"dual_encoder": towers}
    draft = Draft(f"{folder}/embeddings", kind="embeddings", config=Plain(), parents=parents)
    if draft.finished:
        return towers, draft.existing()
    for part, found in counts.items():
        embedded = vectors.unit(np.asarray(found @ rows, np.float32))
        columns = {"doc_id": dataset.table(part, ["doc_id"])["doc_id"], "summary": vectors.to_arrow(embedded)}
        draft.write_table(part.replace("documents/", "embeddings/", 1), pa.table(columns))
    return towers, draft.commit(counts={"documents": whole.shape[0]})


def term_counts(texts: Sequence[str], tokenizer: Tokenizer) -> sparse.csr_matrix:
    """1 + log of how often each text has each token."""
    tokens = [found.ids for found in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    row = np.repeat(np.arange(len(texts)), [len(ids) for ids in tokens])
    column = np.concatenate([np.array(ids, np.int64) for ids in tokens])
    shape = (len(texts), tokenizer.get_vocab_size())
    counts = sparse.csr_matrix((np.ones(len(row), np.float32), (row, column)), shape=shape)
    counts.sum_duplicates()
    counts.data = 1 + np.log(counts.data)
    return counts


def dataset_config(options: Any, clicks: Mapping[str, Any]) -> ChorusIcecat:
    """The data set with these clicks."""
    values = {"click_model": clicks, "max_documents": options.max_documents}
    return validate(ChorusIcecat, values, source="benchmark")


def one_seed(seed: int, built: Mapping[str, Artifact], options: Any) -> dict[str, dict[str, float]]:
    """Measures of every row, for one draw of users and clicks."""
    with TemporaryDirectory() as folder:
        world = simulate(seed, built, Path(folder), options)
        tower = QueryEncoder.load(built["dual_encoder"].directory("query"))
        plain = vectors.unit(tower.encode_queries(world.queries))
        table = built["embeddings"].table("embeddings", ["doc_id", "summary"])
        documents = vectors.to_numpy(table["summary"])
        found = {"plain": measure(plain[world.asked], documents, world)}
        terms = load_planner(built["planner"]).term_scores([world.queries[i] for i in world.asked])
        for name in options.rows:
            config = validate(FuseConfig, knobs(ROWS[name], seed), source=name)
            clicks = sum(batch["clicked"].true_count for batch in world.dataset.batches("impressions"))
            epochs = options.steps / max(clicks // config.global_batch, 1)
            config = config.model_copy(update={"epochs": epochs})
            side, final = fuse(config, world.dataset, built, f"{folder}/{name}")
            queries = side.fuse(plain[world.asked], terms=terms, users=world.users)
            found[name] = measure(queries, final, world)
            show(f"seed {seed}", [{"embedding": SHOWN[n], **m} for n, m in found.items()])
        return found


def fuse(
    config: FuseConfig, dataset: Artifact, built: Mapping[str, Artifact], folder: str
) -> tuple[QueryFusion, Float[ndarray, "docs dim"]]:
    """What the stage does, in this process: a dozen small runs would mostly wait for Ray."""
    corpus = Corpus(dataset, built["embeddings"], built["semantic_ids"])
    prepared.read_clicks(config, dataset, folder=folder, each=map)
    prepared.fit_features(config, dataset, folder=folder, each=map)
    of_queries = slices(dataset, "queries")
    words = config.query.planner.words if config.query.planner else 0
    encode = QueryParts(tower=built["dual_encoder"], planner=built["planner"], words=words)
    files = []
    for number in range(len(of_queries)):
        name = f"{prepared.QUERIES}/{number:05d}.arrow"
        asked = read_queries(name, dataset=dataset, slices=of_queries, store=folder)
        files.append((name, write_table(f"{folder}/{name}", encode(name, asked).table)))
    facts = prepared.finish(config, corpus, queries=files, folder=folder, each=map)
    known = prepared.encodings(folder)
    seen = torch.from_numpy(array(f"{folder}/{prepared.SEEN}").copy())
    ids = safetensors.load_file(built["semantic_ids"].file("codebooks.safetensors"))["codebooks"]
    stage = build(config, ids, **known, seen=seen)
    order = Order(facts["sizes"], global_batch=config.global_batch, seed=config.seed)
    fit(
        engine.build(stage, schedule=config, device=torch.device("cpu")),
        ClickBatches(Store.open(folder), order, config, **known, rank=0, world=1),
        steps=order.steps(config.epochs),
        schedule=config,
        checkpoints=Checkpoints(f"{folder}/checkpoints", keep=1),
        room="fuse",
    )
    documents = DocumentFusion(stage.documents, config.document, known["documents"])
    parts = [
        read_part(corpus, p, documents.columns) for p in corpus.embeddings.names("embeddings/", ".parquet")
    ]
    final = [documents.fuse(part.table, part.embeddings, part.codes) for part in parts]
    return QueryFusion(stage.queries, config.query, known["users"]), np.concatenate(final)


def knobs(row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A fusion config of a row."""
    return {**row, "seed": seed, "resources": {"workers": 0}, "optimizer": {"peak_lr": 1e-3}}


def simulate(seed: int, built: Mapping[str, Artifact], folder: Path, options: Any) -> World:
    """Clicks of this seed's users on training queries, and test queries with users who ask them."""
    source = dataset_config(options, {**CLICKS, "seed": seed})
    dataset = prepare(source, output=str(folder / "dataset"))
    assert source.click_model is not None
    documents = dataset.table("documents", ["doc_id", "topic", *CLICKS["taste"]["columns"]])
    taste = source.click_model.taste
    assert taste is not None
    tastes = Tastes.draw(taste, documents, users=source.click_model.users, seed=seed)
    qrels = {q: judged for q, judged in judgements(dataset).items() if max(judged.values()) > 0}
    table = dataset.table("queries").to_pylist()
    texts = {row["query_id"]: row["query"] for row in table if row["query_id"] in qrels}
    tested = {row["query_id"] for row in table if row["split"] == "test"}
    names_of_queries = sorted(texts)
    rng = np.random.default_rng(seed)
    known = known_users(dataset, built["semantic_ids"])
    ids = sorted(known)
    asked, names = [], []
    for query in range(len(names_of_queries)):
        for user in rng.choice(len(ids), min(options.users_per_query, len(ids)), replace=False):
            asked.append(query)
            names.append(ids[user])
    row_of = {doc: row for row, doc in enumerate(documents["doc_id"].to_pylist())}
    best = max(max(judged.values()) for judged in qrels.values())
    grades = np.zeros((len(qrels), len(row_of)))
    for query, name in enumerate(names_of_queries):
        for doc, grade in qrels[name].items():
            grades[query, row_of[doc]] = max(grade, 0) / best
    numbers = np.array([int(name.removeprefix("u-")) for name in names])
    gains = grades[asked] * tastes.factor(numbers[:, None], np.arange(len(row_of))[None])
    pairs = {(names_of_queries[q], name): i for i, (q, name) in enumerate(zip(asked, names, strict=True))}
    sessions = later(qrels, documents, tastes, source.click_model, seed=seed)
    judged = np.zeros(len(row_of), bool)
    judged[[row_of[doc] for doc in dataset.table("qrels")["doc_id"].to_pylist()]] = True
    asking = [known[name] for name in names]
    queries = [texts[name] for name in names_of_queries]
    new = np.array([names_of_queries[query] in tested for query in asked])
    return World(dataset, queries, new, asked, asking, gains, judged, sessions, pairs)


def known_users(dataset: Artifact, semantic_ids: Artifact) -> dict[str, User]:
    """Profile and history of every user who clicked in the training log."""
    ids = semantic_ids.table("codes", ["doc_id", "semantic_id"])
    name_of = dict(zip(ids["doc_id"].to_pylist(), ids["semantic_id"].to_pylist(), strict=True))
    log = dataset.table("impressions", ["user_id", "doc_id", "clicked", "timestamp", "position"])
    log = log.filter(log["clicked"]).sort_by([("timestamp", "ascending"), ("position", "ascending")])
    clicked: dict[str, list[str]] = {}
    for user, doc in zip(log["user_id"].to_pylist(), log["doc_id"].to_pylist(), strict=True):
        clicked.setdefault(user, []).append(name_of[doc])
    profiles = {row.pop("user_id"): row for row in dataset.table("users").to_pylist()}
    return {user: User(profiles[user], names) for user, names in clicked.items()}


def judgements(dataset: Artifact) -> trec.Qrels:
    """All of them, by query."""
    qrels: trec.Qrels = {}
    for row in dataset.table("qrels").to_pylist():
        qrels.setdefault(row["query_id"], {})[row["doc_id"]] = row["relevance"]
    return qrels


def later(
    qrels: trec.Qrels, documents: pa.Table, tastes: Tastes, config: AnyClickModel, *, seed: int
) -> pa.Table:
    """Sessions of all queries, by the same users, after training."""
    rows = [
        {"query_id": query, "doc_id": doc, "relevance": grade}
        for query, judged in qrels.items()
        for doc, grade in judged.items()
    ]
    return click_model.simulate(
        pa.Table.from_pylist(rows),
        doc_ids=documents["doc_id"].to_pylist(),
        topics=documents["topic"].to_pylist(),
        # Shuffled lists, each place looked at: what is measured is taste and relevance, not position.
        config=config.model_copy(update={"seed": 1000 + seed, "ranker_skill": 0.0, "eta": 0.0}),
        tastes=tastes,
    )


def measure(
    queries: Float[ndarray, "pairs dim"], documents: Float[ndarray, "docs dim"], world: World
) -> dict[str, float]:
    """nDCG@10 over all documents and AUC within sessions."""
    scores = queries @ documents.T
    top = np.argsort(-np.where(world.judged, scores, -np.inf), axis=1, kind="stable")[:, :10]
    discount = 1 / np.log2(np.arange(2, 12))
    got = (np.take_along_axis(world.gains, top, axis=1) * discount).sum(axis=1)
    ideal = (-np.sort(-world.gains, axis=1)[:, :10] * discount).sum(axis=1)
    doc_ids = world.dataset.table("documents", ["doc_id"])["doc_id"].combine_chunks()
    session = world.sessions.append_column(
        "row", pc.index_in(world.sessions["doc_id"], value_set=doc_ids)
    ).to_pylist()
    by_session: dict[str, list[tuple[float, bool]]] = {}
    is_new: dict[str, bool] = {}
    for row in session:
        pair = world.pair_of.get((row["query_id"], row["user_id"]))
        if pair is not None:
            scored = (float(scores[pair, row["row"]]), row["clicked"])
            by_session.setdefault(row["session_id"], []).append(scored)
            is_new[row["session_id"]] = bool(world.new[pair])
    areas = {name: auc(rows) for name, rows in by_session.items()}
    found: dict[str, float] = {}
    for suffix, new in (("", False), ("_new", True)):
        found[f"ndcg10{suffix}"] = float((got / ideal)[world.new == new].mean())
        found[f"auc{suffix}"] = statistics.mean(
            area for name, area in areas.items() if area is not None and is_new[name] == new
        )
    return found


def auc(scored: Sequence[tuple[float, bool]]) -> float | None:
    """The chance that a clicked document stands above one that was not; None without both."""
    yes = np.array([score for score, clicked in scored if clicked])
    no = np.array([score for score, clicked in scored if not clicked])
    if not len(yes) or not len(no):
        return None
    return float(((yes[:, None] > no) + 0.5 * (yes[:, None] == no)).mean())


def shown(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Mean ± standard deviation over seeds."""
    return {
        title: f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"
        for title, name in SHOWN_MEASURES.items()
        for values in [[row[name] for row in rows]]
    }


def metrics(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """``ndcg10_plain``, ``auc_history`` and so on: means over seeds."""
    return {
        f"{measure_}_{name}": round(statistics.mean(row[measure_] for row in rows), 4)
        for name, rows in found.items()
        for measure_ in SHOWN_MEASURES.values()
    }


if __name__ == "__main__":
    main()
