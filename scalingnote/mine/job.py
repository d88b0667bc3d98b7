"""The mine stage on Ray: new hard negatives for triplets, from a ranking of their queries.

    triplets ─► distinct queries ─query tower─► embeddings ─┐
    document embeddings, by shard ──────────────────────────┴─► SearchedRanking ─┐
    TREC run files ───────────────────────────────────────────► RunFileRanking ──┴─► refresh ─► triplets

As in ANCE (Xiong et al. 2021), each round of training draws its negatives by the model of the last one. Each
arrow is a step of tasks that leave files and a record: a run after a kill repeats only the tasks without one.
Actors encode and refresh, because they hold a tower or run files; the driver holds names and counts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from scalingnote import cluster
from scalingnote.datasets.splits import held_out_documents
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import get_logger
from scalingnote.mine.config import MineConfig
from scalingnote.mine.refresh import (
    RunFileRanking,
    SearchedRanking,
    batch_folder,
    cut_runs,
    positives_by_query,
    refresh,
)
from scalingnote.mine.search import (
    QUERIES,
    Documents,
    Piece,
    Place,
    batches_of,
    merge_shards,
    places_of,
    read_batch,
    search_shard,
    write_embeddings,
    write_pieces,
)
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import (
    Artifact,
    Draft,
    Part,
    open_artifact,
    read_table,
    write_file,
    write_table,
)
from scalingnote.storage.shuffle import JsonRecord, run_slices

log = get_logger("mine")


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
    config = _with_checksums(config)
    draft = Draft(output, kind="triplets", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    cluster.check_resources(config.resources, knob="mine.resources")
    source, folder = parents["triplets"], draft.work()
    rows = source.rows_of(source.names("triplets/", ".parquet"))
    places: dict[str, list[Place]] = {}
    if config.runs:
        runs = tuple(fs.absolute(uri) for uri in config.runs)  # workers have other working directories
        held_out = held_out_documents(parents["dataset"], each=cluster.map_tasks)
        cut_runs(runs, source, held_out=held_out, folder=folder, each=cluster.map_tasks)
    else:
        places = _search(config, parents, rows, folder)
    counts = Counter(mined=0, kept=0, mixed=0, short=0, triplets=0)
    work = cluster.Loaded(partial(Miner, config, parents, draft.uri, folder, places))
    each = partial(cluster.map_loaded, resources=config.resources.without_gpus())
    step = partial(run_slices, folder=folder, section="mine")
    records = step("mined", work, [*rows], each=each, unit="triplets", rows=[*rows.values()])
    for name, record in zip(rows, records, strict=True):
        draft.register(name, Part(**record["part"]))
        counts.update(record["counts"])
    if not counts["mined"] and not counts["mixed"]:
        raise DataError(
            f"no negative was mined for {source.counts['triplets']:,} triplets: widen first_rank..last_rank "
            "or raise max_score_ratio"
        )
    unchanged = [*source.names("answers/"), *source.names("generated/")]
    for name, part in cluster.map_tasks(partial(copy_part, source=source, output=output), unchanged):
        draft.register(name, part)
    log.info("%s", ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return draft.commit(
        counts=dict(counts), simulated_clicks=bool(source.manifest.info.get("simulated_clicks", False))
    )


def _with_checksums(config: MineConfig) -> MineConfig:
    """The config with the checksums of its run files; ConfigError where it names others."""
    sums = tuple(fs.checksum(uri) for uri in config.runs)
    if config.runs_sha256 not in ((), sums):
        raise ConfigError(
            f"the files of mine.runs have sha256 {', '.join(sums) or 'none'}, not "
            f"{', '.join(config.runs_sha256)}: name the right files, or leave mine.runs_sha256 out"
        )
    return config.model_copy(update={"runs_sha256": sums})


def copy_part(name: str, *, source: Artifact, output: str) -> tuple[str, Part]:
    """Copy a part of another artifact."""
    return name, write_file(fs.join(output, name), source.read_bytes(name))


# --- search ------------------------------------------------------------------------------------------------


def _search(
    config: MineConfig, parents: Mapping[str, Artifact], rows: Mapping[str, int], folder: str
) -> dict[str, list[Place]]:
    """Search the documents for all queries; returns the places of each part's results."""
    embeddings, step = parents["embeddings"], partial(run_slices, folder=folder, section="mine")
    write = partial(write_pieces, triplets=parents["triplets"], folder=folder)
    sizes = [*rows.values()]
    cut: list[list[Piece]] = step(
        "queries", write, [*rows], each=cluster.map_tasks, unit="triplets", rows=sizes
    )
    pieces = [piece for own in cut for piece in own]
    encode = cluster.Loaded(partial(QueryTower, config, parents["dual_encoder"]))
    actors = partial(cluster.map_loaded, resources=config.resources)
    step("encoded", encode, pieces, each=actors, unit="queries", rows=[piece["queries"] for piece in pieces])
    batches, shards = batches_of(pieces), _shards(embeddings)
    documents = Documents(embeddings, *_training_share(config, parents), config.seed)
    sizes = [sum(embeddings.rows_of(shard).values()) for shard in shards]
    items = [(batch, shard) for batch in range(len(batches)) for shard in range(len(shards))]
    log.info(
        "searching %s documents for %s queries", f"{sum(sizes):,}", f"{sum(p['queries'] for p in pieces):,}"
    )
    step(
        "search",
        partial(
            search_task, config=config, batches=batches, shards=shards, documents=documents, folder=folder
        ),
        items,
        each=partial(cluster.map_tasks_in_order, resources=config.resources.without_gpus()),
        unit="documents",
        rows=[sizes[shard] for _, shard in items],
    )
    merge = partial(merge_task, shards=len(shards), folder=folder)
    step("merge", merge, range(len(batches)), each=cluster.map_tasks, unit="batches of queries")
    places = places_of(batches)
    return {name: [places[piece["folder"]] for piece in own] for name, own in zip(rows, cut, strict=True)}


def _shards(embeddings: Artifact) -> list[dict[str, int]]:
    """Names of the parts of each shard, with the row of a part's first document."""
    first = embeddings.first_rows("embeddings")
    slices = shuffle.slices_by_bytes(embeddings, "embeddings")
    return [{name: first[name] for name in names} for names in slices]


def _training_share(config: MineConfig, parents: Mapping[str, Artifact]) -> tuple[Any, float]:
    """Ids of documents excluded from training, and the share of the others to search."""
    held_out = held_out_documents(parents["dataset"], each=cluster.map_tasks)
    if config.max_documents is None:
        return held_out, 1.0
    return held_out, config.max_documents / max(parents["embeddings"].counts["documents"] - len(held_out), 1)


class QueryTower:
    """Encodes the queries of a piece."""

    def __init__(self, config: MineConfig, towers: Artifact) -> None:
        import torch  # late: mining run files needs no torch

        torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
        self._encoder = QueryEncoder.load(towers.directory("query"), token_budget=config.token_budget)

    def __call__(self, item: tuple[int, Piece]) -> None:
        """Write the embeddings of a piece."""
        queries = read_table(fs.join(item[1]["folder"], QUERIES))["query"].to_pylist()
        write_embeddings(item[1], self._encoder.encode_queries(queries))


def search_task(
    item: tuple[int, tuple[int, int]],
    *,
    config: MineConfig,
    batches: Sequence[Sequence[Piece]],
    shards: Sequence[dict[str, int]],
    documents: Documents,
    folder: str,
) -> None:
    """Search a batch of queries in a shard."""
    batch, shard = item[1]
    found = search_shard(read_batch(batches[batch]), shards[shard], documents, config)
    found.write(_shard_folder(folder, batch, shard))


def merge_task(item: tuple[int, int], *, shards: int, folder: str) -> None:
    """Merge the results of a batch over all shards."""
    batch = item[1]
    merge_shards([_shard_folder(folder, batch, shard) for shard in range(shards)]).write(
        batch_folder(folder, batch)
    )


def _shard_folder(folder: str, batch: int, shard: int) -> str:
    return fs.join(folder, "found", f"{batch:05d}", f"{shard:05d}")


# --- refresh -----------------------------------------------------------------------------------------------


class Miner:
    """Reads a part of triplets and the rankings of its queries, writes it with mined negatives."""

    def __init__(
        self,
        config: MineConfig,
        parents: Mapping[str, Artifact],
        draft_uri: str,
        folder: str,
        places: Mapping[str, Sequence[Place]],
    ) -> None:
        self._config, self._triplets, self._output = config, parents["triplets"], draft_uri
        self._ranking = (
            RunFileRanking(self._triplets, folder) if config.runs else SearchedRanking(places, folder)
        )

    def __call__(self, item: tuple[int, str]) -> JsonRecord:
        """Mine a part."""
        name = item[1]
        table = self._triplets.table(name)
        rankings, scores = self._ranking.rank(name, table)
        answers = name.replace("triplets/", "answers/", 1)
        has_answers = answers in self._triplets.manifest.parts
        known = positives_by_query(table, *([self._triplets.table(answers)] if has_answers else []))
        fresh, counts = refresh(table, rankings, known=known, positive_scores=scores, config=self._config)
        part = write_table(fs.join(self._output, name), fresh)
        return {"part": asdict(part), "counts": counts | {"triplets": len(fresh)}}
