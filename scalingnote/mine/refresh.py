"""Rankings of documents for the queries of triplets, and triplets with negatives mined from them.

A ranking is what a search found (:mod:`scalingnote.mine.search`), or comes from run files, whose lines are
cut by the parts of triplets that need them:

    triplets ─► queries of each part ─┐ by the hash of the query
    run files ─► lines ───────────────┴─► their join ─► ranked lines of each part ─► RunFileRanking

Every arrow is a step of tasks, which hold a slice of a run file or a bucket of queries: no task, and not the
driver, reads a run file as a whole.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.collect.triplets import draw
from scalingnote.datasets.file_formats import RUN_ROWS, find_trec_slices, read_run_slice
from scalingnote.datasets.raw_rows import FileSlice
from scalingnote.mine.config import MineConfig
from scalingnote.mine.search import BatchNeighbors, Place, number_queries, rows_between
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle, trec
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner, run_slices

RankedDocuments = Sequence[tuple[str, float]]  # doc_id and score, best first
Ranked = tuple[Mapping[str, RankedDocuments], list[float | None]]
MAX_BUCKETS = 256  # of queries, by the hash of their ids
_ASKED = pa.schema({"query_id": pa.string(), "part": pa.int64()})
_LINES = RUN_ROWS.append(pa.field("file", pa.int64()))


class SearchedRanking:
    """Ranks by the search of the last round's dual encoder; a batch of results is in memory at a time."""

    def __init__(self, places: Mapping[str, Sequence[Place]], folder: str) -> None:
        """Rank by results in `folder`; `places` are those of each part's pieces, in order."""
        self._places, self._folder = places, folder

    def rank(self, name: str, triplets: pa.Table) -> Ranked:
        """Rankings by query_id for a part, and the score of each row's positive if it was searched."""
        places = self._places[name]
        numbers, query_ids = number_queries(triplets)
        scores = np.full(len(triplets), np.nan)
        starts = [*accumulate((place.queries for place in places), initial=0)]
        for start, place in zip(starts, places, strict=False):
            rows = rows_between(numbers, start, start + place.queries)
            positives = read_neighbors(batch_folder(self._folder, place.batch)).positives
            scores[rows] = positives[place.pair : place.pair + place.pairs]
        rankings = _SearchedRankings(query_ids, places, starts, self._folder)
        return rankings, [None if np.isnan(score) else score for score in scores.tolist()]


class _SearchedRankings(Mapping[str, RankedDocuments]):
    """Rankings of a part's queries, each read when it is asked for."""

    def __init__(
        self, query_ids: pa.Array, places: Sequence[Place], starts: Sequence[int], folder: str
    ) -> None:
        self._number = {query_id: number for number, query_id in enumerate(query_ids.to_pylist())}
        self._places, self._starts, self._folder = places, starts, folder

    def __getitem__(self, query_id: str) -> RankedDocuments:
        number = self._number[query_id]
        piece = bisect_right(self._starts, number) - 1
        place = self._places[piece]
        found = read_neighbors(batch_folder(self._folder, place.batch))
        line = place.query + number - self._starts[piece]
        rows = found.rows[line][found.rows[line] >= 0]
        at = np.searchsorted(found.documents["row"].to_numpy(), rows)
        doc_ids = found.documents["doc_id"].take(pa.array(at)).to_pylist()
        return list(zip(doc_ids, found.scores[line][: len(rows)].tolist(), strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)


@lru_cache(maxsize=1)
def read_neighbors(folder: str) -> BatchNeighbors:
    """The results of a batch; those of the last one asked for stay in memory."""
    return BatchNeighbors.read(folder)


def batch_folder(folder: str, batch: int) -> str:
    """Where the results of a batch are."""
    return fs.join(folder, "merged", f"{batch:05d}")


# --- rankings of run files ----------------------------------------------------------------------------------


class RunFileRanking:
    """Ranks by TREC run files, without documents excluded from training; a part reads its own queries."""

    def __init__(self, triplets: Artifact, folder: str) -> None:
        """Rank by the lines that :func:`cut_runs` left in `folder` for each part of the triplets."""
        self._names, self._folder = triplets.names("triplets/", ".parquet"), folder

    def rank(self, name: str, triplets: pa.Table) -> Ranked:
        """Rankings by query_id, and the score of each row's positive."""
        number = self._names.index(name)
        lines = shuffle.gather(fs.join(self._folder, "ranked"), number, schema=RUN_ROWS)
        runs = trec.grouped(lines)
        pairs = zip(triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), strict=True)
        return runs, [_score(runs.get(query_id, []), doc_id) for query_id, doc_id in pairs]


def _score(ranking: RankedDocuments, doc_id: str) -> float | None:
    # A document below the end of a run scores at most as much as the last one.
    return dict(ranking).get(doc_id, ranking[-1][1] if ranking else None)


def cut_runs(
    runs: Sequence[str], triplets: Artifact, *, held_out: pa.Array, folder: str, each: TaskRunner
) -> None:
    """Cut run files by the parts of triplets; finished tasks of an earlier, killed call are not repeated.

    Args:
        runs: URIs of TREC run files. Of a query in several files the last one counts.
        triplets: whose queries are ranked.
        held_out: ids of documents that are left out.
        folder: work directory.
        each: runs the tasks.

    Raises:
        DataError: an invalid line, or a document that is there twice in a query.
    """
    names = triplets.names("triplets/", ".parquet")
    buckets = min(max(len(names), 1), MAX_BUCKETS)
    step = partial(run_slices, folder=folder, section="mine", each=each)
    asked = partial(scatter_mined_queries, triplets=triplets, folder=folder, buckets=buckets)
    step("asked", asked, names, unit="parts")
    slices = [(file, piece) for file, uri in enumerate(runs) for piece in find_trec_slices(uri)]
    lines = partial(scatter_lines, held_out=held_out, folder=folder, buckets=buckets)
    step("lines", lines, slices, unit="slices of run files")
    step("join", partial(join_runs, folder=folder), range(buckets), unit="buckets of queries")


def scatter_mined_queries(item: tuple[int, str], *, triplets: Artifact, folder: str, buckets: int) -> None:
    """Write the queries of a part of triplets to buckets."""
    number, name = item
    query_ids = triplets.table(name, columns=["query_id"])["query_id"].unique()
    asked = pa.table({"query_id": query_ids, "part": np.full(len(query_ids), number)})
    bucket = shuffle.bucket_of(asked["query_id"], buckets)
    shuffle.scatter(asked, bucket, target=fs.join(folder, "asked"), name=f"{number:05d}")


def scatter_lines(
    item: tuple[int, tuple[int, FileSlice]], *, held_out: pa.Array, folder: str, buckets: int
) -> None:
    """Write the lines of a slice of a run file to buckets, without documents excluded from training."""
    number, (file, piece) = item
    rows = read_run_slice(piece)
    rows = rows.filter(pc.invert(pc.is_in(rows["doc_id"], value_set=held_out)))
    rows = rows.append_column("file", pa.array(np.full(len(rows), file)))
    bucket = shuffle.bucket_of(rows["query_id"], buckets)
    shuffle.scatter(rows, bucket, target=fs.join(folder, "lines"), name=f"{number:05d}")


def join_runs(item: tuple[int, int], *, folder: str) -> None:
    """Order a bucket's lines and write them to the parts that ask for their queries."""
    bucket = item[1]
    lines = shuffle.gather(fs.join(folder, "lines"), bucket, schema=_LINES)
    asked = shuffle.gather(fs.join(folder, "asked"), bucket, schema=_ASKED)
    last = lines.group_by("query_id").aggregate([("file", "max")]).rename_columns(["query_id", "file"])
    lines = lines.join(last, ["query_id", "file"], join_type="inner")
    trec.check_distinct(lines, "a file of mine.runs")
    joined = lines.join(asked, "query_id", join_type="inner")
    joined = joined.sort_by(trec.RUN_ORDER).select([*RUN_ROWS.names, "part"])
    target = fs.join(folder, "ranked")
    shuffle.scatter(
        joined.drop_columns("part"), joined["part"].to_numpy(), target=target, name=f"{bucket:05d}"
    )


# --- negatives ---------------------------------------------------------------------------------------------


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
        The triplets, and counts of rows: ``mined``; ``kept`` (too few candidates, or none: the old negatives
        stay); ``mixed`` (too few of either: the mined ones, then old ones). Rows of any kind that have fewer
        than ``num_negatives`` even so are ``short``: training masks what is absent.
    """
    counts: Counter[str] = Counter()
    unscored: list[bool] = []
    used_by_query: dict[str, set[str]] = {}
    negatives: list[list[str]] = []
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
        elif len(old) >= config.num_negatives or not drawn:
            counts["kept"] += 1
            negatives.append(old[: config.num_negatives])
            unscored.append(len(old) > config.num_negatives)
        else:
            counts["mixed"] += 1
            used.update(drawn)
            both = [*drawn, *(doc_id for doc_id in old if doc_id not in drawn)]
            negatives.append(both[: config.num_negatives])
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
    """Query_id -> positives, of tables with `query_id` and `positive`."""
    positives: dict[str, set[str]] = {}
    pairs = pa.concat_tables([table.select(["query_id", "positive"]) for table in tables])
    for query_id, positive in zip(pairs["query_id"].to_pylist(), pairs["positive"].to_pylist(), strict=True):
        positives.setdefault(query_id, set()).add(positive)
    return positives
