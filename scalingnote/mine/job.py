"""The mine stage: triplets and a ranking of their queries come in, triplets with harder negatives go out.

The ranking is an exact search of the last round's document embeddings, a part of triplets per Ray task, or
comes from run files. Embeddings are laid out once and memory-mapped by every actor of a machine.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from scalingnote import cluster, topk
from scalingnote.collect.triplet import share
from scalingnote.datasets.trainable import held_out_documents
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import DataError
from scalingnote.log import Progress, get_logger
from scalingnote.mine.config import MineConfig
from scalingnote.mine.hard_negatives import Ranking, positives_by_query, refresh
from scalingnote.storage import filesystem as fs
from scalingnote.storage import trec, vectors
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_table

log = get_logger("mine")
SEARCHED_VIEW = "summary"
POOL = "documents.arrow"


def run(
    config: MineConfig, *, dataset: str, triplets: str, dual_encoder: str, embeddings: str, output: str
) -> Artifact:
    """Build the next round's `triplets`. DataError when no negative could be mined at all."""
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "triplets": open_artifact(triplets, kind="triplets"),
        "dual_encoder": open_artifact(dual_encoder, kind="dual_encoder"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
    }
    # Workers have other working directories.
    runs = tuple(fs.absolute(uri) for uri in config.runs)
    sums = tuple(fs.checksum(uri) for uri in runs)
    draft = Draft(
        output,
        kind="triplets",
        config=config.model_copy(update={"runs_sha256": sums}),
        parents=parents,
    )
    if draft.finished:
        return draft.existing()
    cluster.check_resources(config.resources, knob="mine.resources")
    if not config.runs:
        _lay_out_pool(config, parents, draft)
    config = config.model_copy(update={"runs": runs})
    source = parents["triplets"]
    records = _records(config, parents, draft)
    counts = Counter(mined=0, kept=0, lost=0, triplets=0)
    for record in records:
        draft.register(record["name"], Part(**record["part"]))
        counts.update(record["counts"])
    if not counts["mined"]:
        raise DataError(
            f"no negative was mined for {source.counts['triplets']:,} triplets: widen first_rank..last_rank "
            "or raise max_score_ratio"
        )
    for name in (*source.names("answers/"), *source.names("generated/")):
        draft.write_bytes(name, fs.read_bytes(source.file(name)))
    log.info("%s", ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return draft.commit(
        counts=dict(counts), simulated_clicks=bool(source.manifest.info.get("simulated_clicks", False))
    )


def _records(config: MineConfig, parents: dict[str, Artifact], draft: Draft) -> list[dict[str, Any]]:
    """What was mined of every part; the records of an earlier, killed run are taken as they are."""
    rows = {
        name: parents["triplets"].manifest.parts[name].rows or 0
        for name in parents["triplets"].names("triplets/", ".parquet")
    }
    notes = {name: draft.work(f"mined/{Path(name).stem}.json") for name in rows}
    todo = [name for name, note in notes.items() if not fs.exists(note)]
    done = sum(rows.values()) - sum(rows[name] for name in todo)
    with Progress("mine", total=sum(rows.values()), done=done, unit="triplets") as progress:
        if todo:
            parts = ray.data.from_items([{"name": name} for name in todo], override_num_blocks=len(todo))
            mined = parts.map_batches(
                Miner,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=min(config.resources.workers, len(todo))),
                fn_constructor_args=(config, parents, draft.work(), draft.uri, notes),
                num_cpus=config.resources.cpus_per_worker,
                num_gpus=config.resources.gpus_per_worker or None,
            )
            for row in cluster.dataset_rows(mined):
                progress.advance(rows[row["name"]])
    return [json.loads(fs.read_bytes(note)) for note in notes.values()]


def _lay_out_pool(config: MineConfig, parents: dict[str, Artifact], draft: Draft) -> None:
    """The documents to search, as one memory-mapped table: those that training may see."""
    held_out = held_out_documents(parents["dataset"])
    pool = parents["embeddings"].table("embeddings", columns=["doc_id", SEARCHED_VIEW])
    pool = pool.filter(pc.invert(pc.is_in(pool["doc_id"], value_set=held_out)))
    if config.max_documents is not None and len(pool) > config.max_documents:
        order = np.argsort([share(doc_id, seed=config.seed) for doc_id in pool["doc_id"].to_pylist()])
        chosen = np.zeros(len(pool), dtype=bool)
        chosen[order[: config.max_documents]] = True
        # Positives stay: their scores bound those of their negatives.
        positives = pc.unique(parents["triplets"].table("triplets", ["positive"])["positive"])
        pool = pool.filter(pc.or_(pa.array(chosen), pc.is_in(pool["doc_id"], value_set=positives)))
    dim = pool.schema.field(SEARCHED_VIEW).type.list_size
    matrix = vectors.to_arrow(vectors.to_numpy(pool[SEARCHED_VIEW]).astype(np.float32))
    log.info("searching %s documents in %d dimensions", f"{len(pool):,}", dim)
    write_table(
        draft.work(POOL), pa.table({"doc_id": pool["doc_id"].combine_chunks(), SEARCHED_VIEW: matrix})
    )


class Miner:
    """Actor: reads whole parts, orders documents for their queries, writes them with fresh negatives."""

    def __init__(
        self,
        config: MineConfig,
        parents: dict[str, Artifact],
        work: str,
        output: str,
        notes: dict[str, str],
    ) -> None:
        self._config, self._triplets, self._output, self._notes = config, parents["triplets"], output, notes
        self._ranking = FromRuns(config, parents) if config.runs else FromTowers(config, parents, work)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Names of parts in and out; their records lie where `notes` says."""
        for name in batch["name"]:
            self._mine(name)
        return batch

    def _answers(self, name: str) -> list[pa.Table]:
        answers = name.replace("triplets/", "answers/", 1)
        return [self._triplets.table(answers)] if answers in self._triplets.manifest.parts else []

    def _mine(self, name: str) -> None:
        part = self._triplets.table(name)
        rankings, scores = self._ranking.rank(part)
        known = positives_by_query(part, *self._answers(name))
        fresh, counts = refresh(part, rankings, known=known, positive_scores=scores, config=self._config)
        written = write_table(fs.join(self._output, name), fresh)
        record = {"name": name, "part": asdict(written), "counts": counts | {"triplets": len(fresh)}}
        fs.write_bytes(self._notes[name], json.dumps(record).encode())


class FromTowers:
    """Ranks by the dual encoder that the triplets trained."""

    def __init__(self, config: MineConfig, parents: dict[str, Artifact], work: str) -> None:
        import torch  # late: runs of other systems are mined without it

        torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
        towers = parents["dual_encoder"].directory("query")
        self._encoder = QueryEncoder.load(towers, token_budget=config.token_budget)
        self._depth = config.last_rank
        local = fs.download(work, [POOL], version=parents["embeddings"].digest)
        pool = pa.ipc.open_file(pa.memory_map(str(Path(local) / POOL))).read_all()
        self._doc_ids = pool["doc_id"].to_pylist()
        self._row_of = {doc_id: row for row, doc_id in enumerate(self._doc_ids)}
        self._documents = vectors.to_numpy(pool[SEARCHED_VIEW])

    def rank(self, part: pa.Table) -> tuple[Mapping[str, Ranking], list[float | None]]:
        """Rankings by query_id, and the score of each row's positive."""
        text = dict(zip(part["query_id"].to_pylist(), part["query"].to_pylist(), strict=True))
        queries = vectors.unit(self._encoder.encode_queries(list(text.values())))
        scores, rows = topk.search(queries, self._documents, k=self._depth)
        rankings = {
            query_id: [(self._doc_ids[row], float(score)) for row, score in zip(found, values, strict=True)]
            for query_id, found, values in zip(text, rows.tolist(), scores.tolist(), strict=True)
        }
        row_of_query = {query_id: row for row, query_id in enumerate(text)}
        return rankings, [
            float(queries[row_of_query[query_id]] @ self._documents[self._row_of[doc_id]])
            if doc_id in self._row_of
            else None
            for query_id, doc_id in zip(
                part["query_id"].to_pylist(), part["positive"].to_pylist(), strict=True
            )
        ]


class FromRuns:
    """Ranks by run files; documents that training may not see are taken out first."""

    def __init__(self, config: MineConfig, parents: dict[str, Artifact]) -> None:
        held_out = set(held_out_documents(parents["dataset"]).to_pylist())
        self._runs: trec.Run = {}
        for uri in config.runs:
            for query_id, found in trec.read_run(uri).items():
                self._runs[query_id] = [row for row in found if row[0] not in held_out]

    def rank(self, part: pa.Table) -> tuple[Mapping[str, Ranking], list[float | None]]:
        """Rankings by query_id, and the score of each row's positive where the run holds it."""
        return self._runs, [
            self._score(query_id, doc_id)
            for query_id, doc_id in zip(
                part["query_id"].to_pylist(), part["positive"].to_pylist(), strict=True
            )
        ]

    def _score(self, query_id: str, doc_id: str) -> float | None:
        """A document below the end of a run scores at most what its last one does."""
        ranking = self._runs.get(query_id, [])
        return dict(ranking).get(doc_id, ranking[-1][1] if ranking else None)
