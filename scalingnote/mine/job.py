"""The mine stage on Ray: new hard negatives for triplets, from a ranking of their queries.

    query tower, document embeddings ─► DualEncoderRanking ─┐
    TREC run files ───────────────────► RunFileRanking ─────┴─► refresh ─► triplets with mined negatives

As in ANCE (Xiong et al. 2021), each round of training draws its negatives by the model of the last one.
Actors mine one part of triplets at a time. Document embeddings are written once, as a table that all actors
of a machine memory-map.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote import cluster, topk
from scalingnote.collect.one_hop import draw, hash_fraction
from scalingnote.datasets.splits import held_out_documents
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import Progress, get_logger
from scalingnote.mine.config import MineConfig
from scalingnote.storage import arrow, trec
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_table

log = get_logger("mine")
SEARCHED_VIEW = "summary"
POOL = "documents.arrow"  # doc_id and embedding of the documents to search, memory-mapped by all workers
RankedDocuments = Sequence[tuple[str, float]]  # doc_id and score, best first


def run(
    config: MineConfig, *, dataset: str, triplets: str, dual_encoder: str, embeddings: str, output: str
) -> Artifact:
    """Build the `triplets` of the next round.

    Args:
        config: ranking, rank window, number of negatives.
        dataset: URI of the dataset.
        triplets: URI of the triplets of this round.
        dual_encoder: URI of the dual encoder that was trained on them.
        embeddings: URI of its document embeddings.
        output: URI of the artifact.

    Raises:
        DataError: no negative could be mined at all.
    """
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "triplets": open_artifact(triplets, kind="triplets"),
        "dual_encoder": open_artifact(dual_encoder, kind="dual_encoder"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
    }
    runs = tuple(fs.absolute(uri) for uri in config.runs)  # workers have other working directories
    sums = tuple(fs.checksum(uri) for uri in runs)
    if config.runs_sha256 not in ((), sums):
        raise ConfigError(
            f"the files of mine.runs have sha256 {', '.join(sums) or 'none'}, not "
            f"{', '.join(config.runs_sha256)}: name the right files, or leave mine.runs_sha256 out"
        )
    hashed = config.model_copy(update={"runs_sha256": sums})
    draft = Draft(output, kind="triplets", config=hashed, parents=parents)
    if draft.finished:
        return draft.existing()
    cluster.check_resources(config.resources, knob="mine.resources")
    if not config.runs:
        _write_pool(config, parents, draft)
    source = parents["triplets"]
    counts = Counter(mined=0, kept=0, lost=0, triplets=0)
    for record in _mine(config.model_copy(update={"runs": runs}), parents, draft):
        draft.register(record["name"], Part(**record["part"]))
        counts.update(record["counts"])
    if not counts["mined"]:
        raise DataError(
            f"no negative was mined for {source.counts['triplets']:,} triplets: widen first_rank..last_rank "
            "or raise max_score_ratio"
        )
    for name in (*source.names("answers/"), *source.names("generated/")):
        draft.write_bytes(name, source.read_bytes(name))
    log.info("%s", ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return draft.commit(
        counts=dict(counts), simulated_clicks=bool(source.manifest.info.get("simulated_clicks", False))
    )


def _write_pool(config: MineConfig, parents: dict[str, Artifact], draft: Draft) -> None:
    """Write the documents to search, without those excluded from training, as one table to memory-map."""
    held_out = held_out_documents(parents["dataset"])
    pool = parents["embeddings"].table("embeddings", columns=["doc_id", SEARCHED_VIEW])
    pool = pool.filter(pc.invert(pc.is_in(pool["doc_id"], value_set=held_out)))
    if config.max_documents is not None and len(pool) > config.max_documents:
        order = np.argsort([hash_fraction(doc_id, seed=config.seed) for doc_id in pool["doc_id"].to_pylist()])
        chosen = np.zeros(len(pool), dtype=bool)
        chosen[order[: config.max_documents]] = True
        # Positives stay, because their scores bound the scores of their negatives.
        positives = pc.unique(parents["triplets"].table("triplets", ["positive"])["positive"])
        pool = pool.filter(pc.or_(pa.array(chosen), pc.is_in(pool["doc_id"], value_set=positives)))
    dim = pool.schema.field(SEARCHED_VIEW).type.list_size
    matrix = arrow.to_arrow(arrow.to_numpy(pool[SEARCHED_VIEW]).astype(np.float32))
    log.info("searching %s documents in %d dimensions", f"{len(pool):,}", dim)
    table = pa.table({"doc_id": pool["doc_id"].combine_chunks(), SEARCHED_VIEW: matrix})
    write_table(draft.work(POOL), table)


def _mine(config: MineConfig, parents: dict[str, Artifact], draft: Draft) -> list[dict[str, Any]]:
    """Mine all parts and return their records; records of an earlier, killed run are reused."""
    source = parents["triplets"]
    rows = {name: source.manifest.parts[name].rows or 0 for name in source.names("triplets/", ".parquet")}
    notes = {name: draft.work(f"mined/{Path(name).stem}.json") for name in rows}
    todo = [name for name, note in notes.items() if not fs.exists(note)]
    done = sum(rows.values()) - sum(rows[name] for name in todo)
    with Progress("mine", total=sum(rows.values()), done=done, unit="triplets") as progress:
        if todo:
            items = [{"name": name} for name in todo]
            arguments = {"config": config, "parents": parents, "work": draft.work(), "output": draft.uri}
            mined = cluster.map_with_actors(items, Miner, arguments | {"notes": notes}, config.resources)
            for row in cluster.dataset_rows(mined):
                progress.advance(rows[row["name"]])
    return [json.loads(fs.read_bytes(note)) for note in notes.values()]


class Miner:
    """Actor: reads a part of triplets, ranks documents for its queries, writes it with mined negatives."""

    def __init__(
        self,
        *,
        config: MineConfig,
        parents: dict[str, Artifact],
        work: str,
        output: str,
        notes: dict[str, str],
    ) -> None:
        self._config, self._triplets, self._output, self._notes = config, parents["triplets"], output, notes
        self._ranking = (
            RunFileRanking(config, parents) if config.runs else DualEncoderRanking(config, parents, work)
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Mine the part of a batch; its record is written last, to the URI in `notes`."""
        (name,) = batch["name"]
        part = self._triplets.table(name)
        rankings, scores = self._ranking.rank(part)
        answers = name.replace("triplets/", "answers/", 1)
        has_answers = answers in self._triplets.manifest.parts
        known = positives_by_query(part, *([self._triplets.table(answers)] if has_answers else []))
        fresh, counts = refresh(part, rankings, known=known, positive_scores=scores, config=self._config)
        written = write_table(fs.join(self._output, name), fresh)
        record = {"name": name, "part": asdict(written), "counts": counts | {"triplets": len(fresh)}}
        fs.write_bytes(self._notes[name], json.dumps(record).encode())
        return batch


class DualEncoderRanking:
    """Ranks by the dual encoder that was trained on the triplets: an exact search of the pool."""

    def __init__(self, config: MineConfig, parents: dict[str, Artifact], work: str) -> None:
        import torch  # late: mining run files needs no torch

        torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
        towers = parents["dual_encoder"].directory("query")
        self._encoder = QueryEncoder.load(towers, token_budget=config.token_budget)
        self._depth = config.last_rank
        local = fs.download(work, [POOL], version=parents["embeddings"].digest)
        pool = pa.ipc.open_file(pa.memory_map(str(Path(local) / POOL))).read_all()
        self._doc_ids = pool["doc_id"].to_pylist()
        self._row_of = {doc_id: row for row, doc_id in enumerate(self._doc_ids)}
        self._documents = arrow.to_numpy(pool[SEARCHED_VIEW])

    def rank(self, triplets: pa.Table) -> tuple[Mapping[str, RankedDocuments], list[float | None]]:
        """Rankings by query_id, and the score of each row's positive if the pool holds it."""
        query_ids, positives = triplets["query_id"].to_pylist(), triplets["positive"].to_pylist()
        text = dict(zip(query_ids, triplets["query"].to_pylist(), strict=True))
        queries = arrow.l2_normalize(self._encoder.encode_queries(list(text.values())))
        scores, rows = topk.search(queries, self._documents, k=self._depth)
        rankings = {
            query_id: [(self._doc_ids[row], float(score)) for row, score in zip(best, values, strict=True)]
            for query_id, best, values in zip(text, rows.tolist(), scores.tolist(), strict=True)
        }
        query_row = {query_id: row for row, query_id in enumerate(text)}
        return rankings, [
            float(queries[query_row[query_id]] @ self._documents[self._row_of[doc_id]])
            if doc_id in self._row_of
            else None
            for query_id, doc_id in zip(query_ids, positives, strict=True)
        ]


class RunFileRanking:
    """Ranks by TREC run files, without documents excluded from training."""

    def __init__(self, config: MineConfig, parents: dict[str, Artifact]) -> None:
        held_out = set(held_out_documents(parents["dataset"]).to_pylist())
        self._runs: trec.Run = {}
        for uri in config.runs:
            for query_id, ranking in trec.read_run(uri).items():
                self._runs[query_id] = [row for row in ranking if row[0] not in held_out]

    def rank(self, triplets: pa.Table) -> tuple[Mapping[str, RankedDocuments], list[float | None]]:
        """Rankings by query_id, and the score of each row's positive."""
        pairs = zip(triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), strict=True)
        return self._runs, [self._score(query_id, doc_id) for query_id, doc_id in pairs]

    def _score(self, query_id: str, doc_id: str) -> float | None:
        # A document below the end of a run scores at most as much as the last one.
        ranking = self._runs.get(query_id, [])
        return dict(ranking).get(doc_id, ranking[-1][1] if ranking else None)


def candidates(
    ranking: RankedDocuments, *, known: Collection[str], positive_score: float | None, config: MineConfig
) -> list[str]:
    """Documents of the rank window that may be negatives, best first.

    Ranks are counted before documents are left out: those in `known`, which answer the query, and those that
    score more than ``max_score_ratio`` times `positive_score` (if there is one, above 0), which probably do.
    """
    ratio = config.max_score_ratio
    bounded = ratio is not None and positive_score is not None and positive_score > 0
    limit = ratio * positive_score if bounded else float("inf")  # type: ignore[operator]
    window = ranking[config.first_rank - 1 : config.last_rank]
    return [doc_id for doc_id, score in window if doc_id not in known and score <= limit]


def refresh(
    triplets: pa.Table,
    rankings: Mapping[str, RankedDocuments],
    *,
    known: Mapping[str, Collection[str]],
    positive_scores: Sequence[float | None],
    config: MineConfig,
) -> tuple[pa.Table, dict[str, int]]:
    """Triplets with mined negatives.

    Args:
        triplets: of the schema TRIPLETS.
        rankings: query_id -> ranking.
        known: query_id -> documents that answer the query.
        positive_scores: the ranking model's score of each row's positive.
        config: rank window, number of negatives, bounds.

    Returns:
        The triplets, and counts of rows: ``mined``, ``kept`` (too few candidates, the old negatives stay),
        and ``lost`` (too few old negatives either; the row is left out).
    """
    counts: Counter[str] = Counter()
    unscored: list[bool] = []
    used_by_query: dict[str, set[str]] = {}
    negatives: list[list[str] | None] = []
    columns = [triplets[name].to_pylist() for name in ("query_id", "positive", "negatives")]
    for query_id, positive, old, score in zip(*columns, positive_scores, strict=True):
        ranking = rankings.get(query_id, ())
        allowed = candidates(ranking, known=known[query_id], positive_score=score, config=config)
        used = used_by_query.setdefault(query_id, set())
        if config.max_per_query is not None and len(used) + config.num_negatives > config.max_per_query:
            allowed = [doc_id for doc_id in allowed if doc_id in used]
        drawn = draw(allowed, config.num_negatives, seed=config.seed, key=f"mined {query_id} {positive}")
        if len(drawn) == config.num_negatives:
            counts["mined"] += 1
            used.update(drawn)
            negatives.append(drawn)
            unscored.append(True)
        elif len(old) >= config.num_negatives:
            counts["kept"] += 1
            negatives.append(old[: config.num_negatives])
            unscored.append(len(old) > config.num_negatives)
        else:
            counts["lost"] += 1
            negatives.append(None)
            unscored.append(True)
    at = triplets.schema.get_field_index("negatives")
    column = pa.array(negatives, triplets.schema.field(at).type)
    fresh = triplets.set_column(at, triplets.schema.field(at), column)
    # Scores belong to the old negatives.
    at = triplets.schema.get_field_index("scores")
    scores = pc.if_else(pa.array(unscored, pa.bool_()), None, triplets["scores"])
    fresh = fresh.set_column(at, triplets.schema.field(at), scores)
    return fresh.filter(pc.is_valid(column)), dict(counts)


def positives_by_query(*tables: pa.Table) -> dict[str, set[str]]:
    """Query_id -> positives, of tables with `query_id` and `positive`."""
    positives: dict[str, set[str]] = {}
    pairs = pa.concat_tables([table.select(["query_id", "positive"]) for table in tables])
    for query_id, positive in zip(pairs["query_id"].to_pylist(), pairs["positive"].to_pylist(), strict=True):
        positives.setdefault(query_id, set()).add(positive)
    return positives
