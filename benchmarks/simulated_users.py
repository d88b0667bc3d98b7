"""Users with tastes who click real products, and what they ask later: what fusion is measured on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float
from numpy import ndarray

from scalingnote.config import validate
from scalingnote.datasets import simulate as simulator
from scalingnote.datasets.config import AnyClickModel, ChorusIcecat
from scalingnote.datasets.job import run as prepare
from scalingnote.datasets.simulate import Tastes
from scalingnote.fuse.feature_store import User
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

CLICKS: dict[str, Any] = {
    "users": 300,
    "sessions_per_query": 300,
    "relevant_per_session": 6,
    "taste": {"columns": ["supplier", "price"], "values": 8, "strength": 0.8, "told": 0.7},
}


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


def dataset_config(options: Any, clicks: Mapping[str, Any]) -> ChorusIcecat:
    """The data set with these clicks."""
    values = {"click_model": clicks, "max_documents": options.max_documents}
    return validate(ChorusIcecat, values, source="benchmark")


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
    sessions = simulator.simulate(
        pa.Table.from_pylist(rows),
        doc_ids=documents["doc_id"].to_pylist(),
        topics=documents["topic"].to_pylist(),
        # Shuffled lists, each place looked at: what is measured is taste and relevance, not position.
        config=config.model_copy(update={"seed": 1000 + seed, "ranker_skill": 0.0, "eta": 0.0}),
        tastes=tastes,
    )
    return pa.concat_tables(sessions)
