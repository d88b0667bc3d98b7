"""Rankings of run files, cut by the parts of triplets that need their lines.

    triplets ─► queries of each part ─┐ by the hash of the query
    run files ─► lines ───────────────┴─► their join ─► ranked lines of each part ─► RunFileRanking

Every arrow is a step of tasks, which hold a slice of a run file or a bucket of queries: no task, and not the
driver, reads a run file as a whole.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.file_formats import RUN_ROWS, find_trec_slices, read_run_slice
from scalingnote.datasets.raw_rows import FileSlice
from scalingnote.errors import DataError
from scalingnote.mine.refresh import Ranked, RankedDocuments
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle, trec
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner, run_slices

MAX_BUCKETS = 256  # of queries, by the hash of their ids
_ASKED = pa.schema({"query_id": pa.string(), "part": pa.int64()})
_LINES = RUN_ROWS.append(pa.field("file", pa.int64()))


class RunFileRanking:
    """Ranks by TREC run files, without documents excluded from training; a part reads its own queries."""

    def __init__(self, triplets: Artifact, folder: str) -> None:
        """Rank by the lines that :func:`cut_runs` left in `folder` for each part of the triplets."""
        self._names, self._folder = triplets.names("triplets/", ".parquet"), folder

    def rank(self, name: str, triplets: pa.Table) -> Ranked:
        """Rankings by query_id, and the score of each row's positive."""
        number = self._names.index(name)
        lines = shuffle.gather(fs.join(self._folder, "ranked"), number, schema=RUN_ROWS).to_pydict()
        runs: trec.Run = {}
        for query_id, doc_id, score in zip(lines["query_id"], lines["doc_id"], lines["score"], strict=True):
            runs.setdefault(query_id, []).append((doc_id, score))
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
    step = partial(run_slices, folder=folder, room="mine", each=each)
    asked = partial(scatter_asked, triplets=triplets, folder=folder, buckets=buckets)
    step("asked", asked, names, unit="parts")
    slices = [(file, piece) for file, uri in enumerate(runs) for piece in find_trec_slices(uri)]
    lines = partial(scatter_lines, held_out=held_out, folder=folder, buckets=buckets)
    step("lines", lines, slices, unit="slices of run files")
    step("join", partial(join_runs, folder=folder), range(buckets), unit="buckets of queries")


def scatter_asked(item: tuple[int, str], *, triplets: Artifact, folder: str, buckets: int) -> None:
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
    pairs = lines.group_by(["query_id", "doc_id"]).aggregate([([], "count_all")])
    if twice := pairs.filter(pc.greater(pairs["count_all"], 1)).to_pylist():
        raise DataError(
            f"a file of mine.runs has document {twice[0]['doc_id']!r} twice in query "
            f"{twice[0]['query_id']!r}: keep one of them"
        )
    joined = lines.join(asked, "query_id", join_type="inner")
    order = [("query_id", "ascending"), ("score", "descending"), ("rank", "ascending")]
    joined = joined.sort_by(order).select([*RUN_ROWS.names, "part"])
    target = fs.join(folder, "ranked")
    shuffle.scatter(
        joined.drop_columns("part"), joined["part"].to_numpy(), target=target, name=f"{bucket:05d}"
    )
