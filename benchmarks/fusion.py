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

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from jaxtyping import Float
from numpy import ndarray
from safetensors import torch as safetensors

from benchmarks import plain_embeddings
from benchmarks.report import arguments, show, write
from benchmarks.simulated_users import CLICKS, World, dataset_config, simulate
from scalingnote import cluster
from scalingnote.config import validate
from scalingnote.datasets.job import run as prepare
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate.measures import auc
from scalingnote.fuse import impressions
from scalingnote.fuse import prepare as prepared
from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.fusion import DocumentFusion, QueryFusion
from scalingnote.fuse.job import QueryParts, build, read_queries
from scalingnote.fuse.prepare import ClickBatches, FusedCorpus, read_part
from scalingnote.log import configure
from scalingnote.planner.config import Statistics
from scalingnote.planner.job import run as plan
from scalingnote.planner.planner import load as load_planner
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.quantize.job import run as quantize
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import slices, write_tables
from scalingnote.train import strategies
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.data import Order, Store
from scalingnote.train.loop import fit
from scalingnote.train.prepare import read_array

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
    towers, embeddings = plain_embeddings.build(dataset, options.run_dir)
    ids = quantize(
        QuantizeConfig(codes=64), embeddings=embeddings.uri, output=f"{options.run_dir}/semantic_ids"
    )
    found = (dataset, planner, towers, embeddings, ids)
    return {artifact.manifest.kind: artifact for artifact in found}


def one_seed(seed: int, built: Mapping[str, Artifact], options: Any) -> dict[str, dict[str, float]]:
    """Measures of every row, for one draw of users and clicks."""
    with TemporaryDirectory() as folder:
        world = simulate(seed, built, Path(folder), options)
        tower = QueryEncoder.load(built["dual_encoder"].directory("query"))
        plain = arrow.l2_normalize(tower.encode_queries(world.queries))
        table = built["embeddings"].table("embeddings", ["doc_id", "summary"])
        documents = arrow.to_numpy(table["summary"])
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
    corpus = FusedCorpus(dataset, built["embeddings"], built["semantic_ids"])
    impressions.read_clicks(config, dataset, folder=folder, each=map)
    prepared.fit_features(config, dataset, folder=folder, each=map)
    of_queries = slices(dataset, "queries")
    words = config.query.planner.words if config.query.planner else 0
    encode = QueryParts(tower=built["dual_encoder"], planner=built["planner"], words=words)
    files = []
    for number in range(len(of_queries)):
        name = f"{prepared.QUERIES}/{number:05d}.arrow"
        asked = read_queries(name, dataset=dataset, slices=of_queries, store=folder)
        files += write_tables(folder, {name: encode(name, asked).table})
    facts = prepared.finish(config, corpus, queries=files, folder=folder, each=map)
    known = prepared.encodings(folder)
    seen = torch.from_numpy(read_array(f"{folder}/{prepared.SEEN}").copy())
    ids = safetensors.load_file(built["semantic_ids"].file("codebooks.safetensors"))["codebooks"]
    stage = build(config, ids, **known, seen=seen)
    order = Order(facts["sizes"], global_batch=config.global_batch, seed=config.seed)
    fit(
        strategies.build(stage, schedule=config, device=torch.device("cpu")),
        ClickBatches(Store.open(folder), order, config, **known, rank=0, world=1),
        steps=order.steps(config),
        schedule=config,
        checkpoints=Checkpoints(f"{folder}/checkpoints", keep=1),
        section="fuse",
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
    by_session: dict[str, list[tuple[float, float]]] = {}
    is_new: dict[str, bool] = {}
    for row in session:
        pair = world.pair_of.get((row["query_id"], row["user_id"]))
        if pair is not None:
            scored = (float(scores[pair, row["row"]]), float(row["clicked"]))
            by_session.setdefault(row["session_id"], []).append(scored)
            is_new[row["session_id"]] = bool(world.new[pair])
    areas = {name: auc(*np.array(rows).T) for name, rows in by_session.items()}
    found: dict[str, float] = {}
    for suffix, new in (("", False), ("_new", True)):
        found[f"ndcg10{suffix}"] = float((got / ideal)[world.new == new].mean())
        found[f"auc{suffix}"] = statistics.mean(
            area for name, area in areas.items() if not math.isnan(area) and is_new[name] == new
        )
    return found


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
