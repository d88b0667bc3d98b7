"""The mine stage on Ray: new hard negatives for triplets, from a ranking of their queries.

    triplets ─► distinct queries ─query tower─► embeddings ─┐
    document embeddings, by shard ──────────────────────────┴─► rankings of a piece ─┐
    TREC run files ─► lines, by the part of their query ─────────────────────────────┴─► refresh ─► triplets

In each round of training, the model of the last round chooses the negatives, as in ANCE (Xiong et al. 2021).
Each arrow is a step of tasks that write files and a record: a run after a kill repeats only the tasks without
a record. A task holds a slice of a run file or a bucket of queries, never an entire run file. Actors encode,
because they hold a tower; the driver holds names and counts.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core import cluster
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import PartStage
from scalingnote.datasets.input_files import FileSlice
from scalingnote.datasets.readers import RUN_ROWS, find_trec_slices, read_run_slice
from scalingnote.datasets.splits import held_out_documents
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.storage import arrow, shuffle, trec
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_file, write_table
from scalingnote.storage.shuffle import JsonRecord, run_slices
from scalingnote.triplets.collect.triplets import draw
from scalingnote.triplets.config import MineConfig
from scalingnote.triplets.mine.search import (
    MineContext,
    Piece,
    RankedDocuments,
    RankedRows,
    batches_of,
    merge_shards,
    read_rankings,
    search_shard,
    write_pieces,
)

log = get_logger("mine")
_LINES = RUN_ROWS.append(pa.field("file", pa.int64()))


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
        ConfigError: the run files have other checksums than the config.
        DataError: no negative could be mined.
    """
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "triplets": open_artifact(triplets, kind="triplets"),
        "dual_encoder": open_artifact(dual_encoder, kind="dual_encoder"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
    }
    config = _with_checksums(config)
    draft = Draft(output, kind="triplets", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    cluster.check_resources(config.resources, knob="mine.resources")
    source = parents["triplets"]
    rows = source.rows_of(source.names("triplets/", ".parquet"))
    context = MineContext(
        folder=draft.work(),
        buckets=max(len(rows), 1),
        config=config,
        triplets=source,
        embeddings=parents["embeddings"],
        held_out=held_out_documents(parents["dataset"], each=cluster.map_tasks),
        output=draft.uri,
    )
    pieces: list[list[Piece]] = [[] for _ in rows]
    if config.runs:
        _scatter_runs(context)
    else:
        pieces = _search(context, parents["dual_encoder"], rows)
    records = run_slices(
        "mined",
        partial(mine_part, context=context),
        [*zip(rows, pieces, strict=True)],
        folder=context.folder,
        each=partial(cluster.map_tasks, resources=config.resources.without_gpus()),
        section="mine",
        unit="triplets",
        rows=[*rows.values()],
    )
    counts = Counter(mined=0, kept=0, mixed=0, short=0, triplets=0)
    for name, record in zip(rows, records, strict=True):
        draft.register(name, Part(**record["part"]))
        counts.update(record["counts"])
    if not counts["mined"] and not counts["mixed"]:
        raise DataError(
            f"no negative was mined for {source.counts['triplets']:,} triplets: widen first_rank..last_rank "
            "or increase max_score_ratio"
        )
    unchanged = [*source.names("answers/"), *source.names("generated/")]
    for name, part in cluster.map_tasks(partial(copy_part, source=source, output=output), unchanged):
        draft.register(name, part)
    log.info("%s", ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return draft.commit(
        counts=dict(counts), simulated_clicks=bool(source.manifest.info.get("simulated_clicks", False))
    )


def _with_checksums(config: MineConfig) -> MineConfig:
    """Set the checksums of the run files in the config; raise ConfigError if it has others."""
    sums = tuple(fs.checksum(uri) for uri in config.runs)
    if config.runs_sha256 not in ((), sums):
        raise ConfigError(
            f"the files of mine.runs have sha256 {', '.join(sums) or 'none'}, not "
            f"{', '.join(config.runs_sha256)}: name the right files, or leave mine.runs_sha256 out"
        )
    return config.model_copy(update={"runs_sha256": sums})


def copy_part(name: str, *, source: Artifact, output: str) -> tuple[str, Part]:
    """Copy a part of another artifact; return its name and record."""
    return name, write_file(fs.join(output, name), source.read_bytes(name))


# --- search ------------------------------------------------------------------------------------------------


def _search(context: MineContext, towers: Artifact, rows: Mapping[str, int]) -> list[list[Piece]]:
    """Search the documents for all queries and write rankings; return the pieces of each part."""
    config, embeddings = context.config, context.embeddings
    step = partial(run_slices, folder=context.folder, section="mine")
    tasks = partial(cluster.map_tasks, resources=config.resources.without_gpus())
    write = partial(write_pieces, context=context)
    sizes = [*rows.values()]
    pieces_of_parts: list[list[Piece]] = step(
        "queries", write, [*rows], each=cluster.map_tasks, unit="triplets", rows=sizes
    )
    pieces = [piece for part_pieces in pieces_of_parts for piece in part_pieces]
    queries = [piece["queries"] for piece in pieces]
    encode = PartStage(partial(PieceEncoder, towers, context))
    actors = partial(cluster.map_loaded, resources=config.resources)
    step("encoded", encode, pieces, each=actors, unit="queries", rows=queries)
    batches = batches_of(pieces)
    # For each shard, its parts and the row of the first document of each part.
    first = embeddings.first_rows("embeddings")
    shards = [
        {name: first[name] for name in names} for names in shuffle.slices_by_bytes(embeddings, "embeddings")
    ]
    share = 1.0
    if config.max_documents is not None:
        share = config.max_documents / max(embeddings.counts["documents"] - len(context.held_out), 1)
    documents = [sum(embeddings.rows_of(shard).values()) for shard in shards]
    items = [(batch, shard) for batch in range(len(batches)) for shard in range(len(shards))]
    log.info("searching %s documents for %s queries", f"{sum(documents):,}", f"{sum(queries):,}")
    search = partial(search_shard, context=context, batches=batches, shards=shards, share=share)
    sizes = [documents[shard] for _, shard in items]
    step("search", search, items, each=tasks, unit="documents", rows=sizes)
    merge = partial(merge_shards, context=context, shards=len(shards))
    step("merge", merge, batches, each=cluster.map_tasks, unit="batches of queries")
    return pieces_of_parts


class PieceEncoder:
    """Worker that encodes the queries of pieces."""

    def __init__(self, towers: Artifact, context: MineContext) -> None:
        import torch  # late: run files are mined without torch

        config = context.config
        torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
        self._encoder = QueryEncoder(towers.directory("query"), token_budget=config.token_budget)
        self._context = context

    def __call__(self, item: tuple[int, Piece]) -> None:
        """Write the embeddings of a piece."""
        name = item[1]["name"]
        queries = self._context.read(f"{name}/queries")["query"].to_pylist()
        embeddings = arrow.to_arrow(self._encoder.encode_queries(queries))
        self._context.write(f"{name}/embeddings", pa.table({"embedding": embeddings}))


# --- run files ---------------------------------------------------------------------------------------------


def _scatter_runs(context: MineContext) -> None:
    """Write the lines of all run files to the parts of their queries."""
    runs = [fs.absolute(uri) for uri in context.config.runs]  # workers have other working directories
    lines = [(file, piece) for file, uri in enumerate(runs) for piece in find_trec_slices(uri)]
    scatter, each = partial(scatter_lines, context=context), cluster.map_tasks
    run_slices("lines", scatter, lines, folder=context.folder, each=each, section="mine")


def scatter_lines(item: tuple[int, tuple[int, FileSlice]], *, context: MineContext) -> None:
    """Write the lines of a slice of a run file to the parts of their queries.

    Documents that are excluded from training are left out.

    Raises:
        DataError: a line is invalid.
    """
    number, (file, piece) = item
    rows = read_run_slice(piece)
    rows = rows.filter(pc.invert(pc.is_in(rows["doc_id"], value_set=context.held_out)))
    rows = rows.append_column("file", pa.array(np.full(len(rows), file)))
    context.scatter(rows, "query_id", "lines", f"{number:05d}")


def read_runs(number: int, triplets: pa.Table, context: MineContext) -> RankedRows:
    """Read the rankings of the run files for all rows of part `number` of the triplets.

    If a query is in several files, the last file counts.

    Raises:
        DataError: a document occurs twice in the ranking of a query.
        ArtifactError: a query is in another part than the one of its hash, which `collect` writes it to.
    """
    query_ids = triplets["query_id"].unique()
    if (shuffle.bucket_of(query_ids, context.buckets) != number).any():
        raise ArtifactError(
            f"{context.triplets.uri} has queries in other parts than `collect` writes: run it again"
        )
    lines = context.gather("lines", number, _LINES)
    lines = lines.filter(pc.is_in(lines["query_id"], value_set=query_ids))
    last = lines.group_by("query_id").aggregate([("file", "max")]).rename_columns(["query_id", "file"])
    runs = trec.ordered_run(lines.join(last, ["query_id", "file"], join_type="inner"), "a file of mine.runs")
    scores: list[float | None] = []
    for query_id, doc_id in zip(
        triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), strict=True
    ):
        ranking = runs.get(query_id, [])
        # A document that is not in a run has at most the score of the last one in it.
        scores.append(dict(ranking).get(doc_id, ranking[-1][1] if ranking else None))
    return np.arange(len(triplets)), runs, scores


# --- negatives ---------------------------------------------------------------------------------------------


def mine_part(item: tuple[int, tuple[str, list[Piece]]], *, context: MineContext) -> JsonRecord:
    """Write a part of triplets with mined negatives; the item has the name and pieces of the part."""
    number, (name, pieces) = item
    table = context.triplets.table(name)
    answers = positives_by_query(table, *_answers(name, context.triplets))
    ranked = read_rankings(table, pieces, context)
    if context.config.runs:
        ranked = iter([read_runs(number, table, context)])
    tables, places, counts = [table.slice(0, 0)], [np.empty(0, np.int64)], Counter(triplets=len(table))
    for rows, rankings, scores in ranked:
        fresh, row_counts = refresh(
            table.take(rows), rankings, known=answers, positive_scores=scores, config=context.config
        )
        tables.append(fresh)
        places.append(rows)
        counts.update(row_counts)
    order = np.argsort(np.concatenate(places))
    fresh = pa.concat_tables(tables).take(order).combine_chunks()
    part = write_table(fs.join(context.output, name), fresh)
    return {"part": asdict(part), "counts": counts}


def _answers(name: str, triplets: Artifact) -> Iterator[pa.Table]:
    """Yield the table of all answers of the queries of a part of triplets, if `collect` wrote it."""
    answers = name.replace("triplets/", "answers/", 1)
    if answers in triplets.manifest.parts:
        yield triplets.table(answers)


def candidates(
    ranking: RankedDocuments, *, known: Collection[str], positive_score: float | None, config: MineConfig
) -> list[str]:
    """Find the documents of the rank window that may be negatives, best first.

    Documents in `known`, which answer the query, are left out, and those that score more than
    ``max_score_ratio`` times `positive_score` (if it is known and above 0), because they probably answer it.
    Ranks are counted before.
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
    """Replace the negatives of triplets by mined ones.

    Args:
        triplets: of the schema TRIPLETS.
        rankings: query_id -> ranking.
        known: query_id -> documents that answer the query.
        positive_scores: the ranking model's score of each row's positive.
        config: rank window, number of negatives, bounds.

    Returns:
        The triplets, and counts of rows: ``mined``; ``kept`` (too few candidates, or none: the old negatives
        are kept); ``mixed`` (too few of both: the mined ones, then old ones). Rows that still have fewer than
        ``num_negatives`` are also ``short``: training masks missing negatives.
    """
    counts: Counter[str] = Counter()
    unscored: list[bool] = []
    negatives: list[list[str]] = []
    columns = [triplets[name].to_pylist() for name in ("query_id", "positive", "negatives")]
    for query_id, positive, old, score in zip(*columns, positive_scores, strict=True):
        ranking = rankings.get(query_id, ())
        allowed = candidates(ranking, known=known[query_id], positive_score=score, config=config)
        mined = draw(allowed, config.num_negatives, seed=config.seed, key=f"mined {query_id} {positive}")
        if len(mined) == config.num_negatives:
            counts["mined"] += 1
            negatives.append(mined)
            unscored.append(True)
        elif len(old) >= config.num_negatives or not mined:
            counts["kept"] += 1
            negatives.append(old[: config.num_negatives])
            unscored.append(len(old) > config.num_negatives)
        else:
            counts["mixed"] += 1
            mixed = [*mined, *(doc_id for doc_id in old if doc_id not in mined)]
            negatives.append(mixed[: config.num_negatives])
            unscored.append(True)
        if len(negatives[-1]) < config.num_negatives:
            counts["short"] += 1
    at = triplets.schema.get_field_index("negatives")
    column = pa.array(negatives, triplets.schema.field(at).type)
    fresh = triplets.set_column(at, triplets.schema.field(at), column)
    # Scores belong to the old negatives.
    at = triplets.schema.get_field_index("scores")
    scores = pc.if_else(pa.array(unscored, pa.bool_()), None, triplets["scores"])
    fresh = fresh.set_column(at, triplets.schema.field(at), scores)
    return fresh, dict(counts)


def positives_by_query(*tables: pa.Table) -> dict[str, set[str]]:
    """Collect query_id -> positives from tables with `query_id` and `positive`."""
    positives: dict[str, set[str]] = {}
    pairs = pa.concat_tables([table.select(["query_id", "positive"]) for table in tables])
    for query_id, positive in zip(pairs["query_id"].to_pylist(), pairs["positive"].to_pylist(), strict=True):
        positives.setdefault(query_id, set()).add(positive)
    return positives
