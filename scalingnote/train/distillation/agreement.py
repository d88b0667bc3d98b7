"""How closely a student reproduces its teacher: in training, and when it is finished.

    validator   held-out queries ─► student ─► cosine to, and squared distance from, the teacher's embeddings
    compare     held-out texts ─► student, teacher ─► cosine, and the overlap of the documents that they find

No relevance judgement is needed: a student that finds the teacher's documents in the teacher's order has lost
nothing. ScalingNote reports the held-out distillation loss of its students (Table 6). The cosine does not
depend on the length of embeddings, so it is comparable between students of all losses; it chooses the best
checkpoint.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core import topk
from scalingnote.core.log import elapsed_status, get_logger, status_lines
from scalingnote.encode.documents import tower_similarity
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.models.prompt import indexed_view
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.train.data import Store, permute
from scalingnote.train.distillation.config import DistillConfig
from scalingnote.train.distillation.prepare import VALIDATION
from scalingnote.train.engine import Engine, broadcast_numbers
from scalingnote.train.validation import encode_rows

MAX_AGREEMENT_QUERIES = 1000  # number of held-out texts that are compared
MAX_DOCUMENTS = 1000  # number of documents that are searched: half a minute to encode with a small teacher
TIMED_TEXTS, WARM_UP_TEXTS = 64, 3
# A linear fit from the overlap@10 of tables to the share of the teacher's nDCG@10 that they keep, its largest
# error on a collection that the fit leaves out, and the range of measurements, from benchmarks/front_door.py
# (a test compares).
KEPT_START, KEPT_PER_OVERLAP, KEPT_ERROR = 0.281, 1.01, 0.08
MEASURED_OVERLAPS, MEASURED_COLLECTIONS = (0.575, 0.728), 6
MEASURED_STUDENTS = ("static", "table")
log = get_logger("distill")


def validator(
    store: Store, engine: Engine, config: DistillConfig, *, pad: int
) -> Callable[[], dict[str, float]] | None:
    """Build a function that measures the student when it is called; None without held-out queries.

    Every rank must call it at the same step. `pad` is the student's pad token.
    """
    if config.validation is None:
        return None
    rows = store[VALIDATION]
    if not len(rows):
        log.info("no query has the validation split: nothing is measured in training")
        return None
    size = min(config.validation.queries, len(rows))
    sample = permute(np.arange(size), size=len(rows), key=(config.seed % 2**64, 0))
    queries, teacher = rows.tokens(sample), rows.values("teacher", sample)

    def validate() -> dict[str, float]:
        embeddings = encode_rows("query", queries, engine=engine, pad=pad)
        return broadcast_numbers(measure_embeddings(embeddings[:, 0], teacher), engine.device)

    return validate


def measure_embeddings(
    student: Float[ndarray, "queries dim"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, float]:
    """Compute mean cosine to the teacher's embeddings, squared distance, and `qkd` of both (Eq. 15)."""
    cosine = (arrow.l2_normalize(student) * arrow.l2_normalize(teacher)).sum(axis=1)
    distance = ((student - teacher) ** 2).sum(axis=1)
    means = {
        "cosine": cosine.mean(),
        "squared_distance": distance.mean(),
        "qkd": (distance - cosine).mean(),
    }
    return {name: float(value) for name, value in means.items()}


@dataclass(frozen=True)
class Agreement:
    """Quality, speed and size of a student and its teacher. None: not measured."""

    queries: int
    """Held-out texts."""
    documents: int
    """Documents searched."""
    cosine: float | None
    """Mean cosine of both embeddings of a text; None without held-out texts."""
    top10: float | None
    """Share of the teacher's ten best documents among the student's; None if at most ten are searched."""
    top100: float | None
    student_queries_per_s: float
    """One query at a time, from the median time, on this machine under its current load."""
    student_bytes: int
    teacher_queries_per_s: float | None = None
    """None if only the vectors of the teacher are known; this also applies to its size."""
    teacher_bytes: int | None = None

    def measures(self) -> dict[str, float]:
        """Return the measured values of the agreement, by name."""
        values = {"cosine": self.cosine, "overlap@10": self.top10, "overlap@100": self.top100}
        return {name: value for name, value in values.items() if value is not None}


def compare(
    query_embeddings: Artifact,
    student: Artifact,
    dataset: Artifact | None = None,
    dual_encoder: Artifact | None = None,
    embeddings: Artifact | None = None,
) -> Agreement:
    """Compare a finished student with its teacher, on samples of the held-out texts and of the documents.

    The documents' `embeddings` are read if the teacher computed them, else the `dual_encoder` encodes a
    sample of the `dataset`. If neither is available, the training texts of the student are searched.
    """
    texts, teacher = _held_out(query_embeddings)
    tower = QueryEncoder(student.directory("query"))
    with status_lines("distill", elapsed_status("comparing the student with its teacher")):
        cosine, overlap, documents = None, {}, 0
        if texts:
            embedded, teacher = arrow.l2_normalize(tower.encode_queries(texts)), arrow.l2_normalize(teacher)
            cosine = float((embedded * teacher).sum(axis=1).mean())
            searched = _searched_embeddings(query_embeddings, dataset, dual_encoder, embeddings)
            documents = len(searched)
            ks = [k for k in (10, 100) if k < documents]
            overlap = {k: neighbour_overlap(teacher, embedded, searched, k=k) for k in ks}
        timed = (texts or ["how to join two tensors"])[:TIMED_TEXTS]
        cost = {} if dual_encoder is None else _teacher_cost(dual_encoder.directory("query"), timed)
        return Agreement(
            queries=len(texts),
            documents=documents,
            cosine=cosine,
            top10=overlap.get(10),
            top100=overlap.get(100),
            student_queries_per_s=1000 / median_ms(lambda text: tower.encode_queries([text]), timed),
            student_bytes=_bytes_of(student.directory("query")),
            **cost,
        )


def _teacher_cost(folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    from scalingnote.encode.encoder import Encoder

    tower = Encoder.load(folder)
    rate = 1000 / median_ms(lambda text: tower.encode_queries([text]), texts)
    return {"teacher_queries_per_s": rate, "teacher_bytes": _bytes_of(folder)}


def neighbour_overlap(
    teacher: Float[ndarray, "texts dim"],
    student: Float[ndarray, "texts dim"],
    searched: Float[ndarray, "docs dim"],
    *,
    k: int,
) -> float:
    """Compute the mean share of the teacher's `k` nearest neighbours that are also the student's."""
    (_, ours), (_, theirs) = (topk.search(queries, searched, k=k) for queries in (student, teacher))
    return float((theirs[:, :, None] == ours[:, None, :]).any(axis=2).mean())


def comparison_rows(agreement: Agreement) -> list[tuple[str, ...]]:
    """Build rows of a table, one per known measure: its name, the student's value, the teacher's."""
    sizes = (agreement.student_bytes, agreement.teacher_bytes)
    megabytes = ["" if size is None else f"{size / 1e6:,.1f} MB" for size in sizes]
    both = (agreement.student_queries_per_s, agreement.teacher_queries_per_s)
    rates = ["" if rate is None else f"{rate:,.0f}" for rate in both]
    of_documents = f"of {agreement.documents:,} documents"
    rows: list[tuple[str, ...]] = []
    if agreement.cosine is not None:
        rows.append(("mean cosine to the teacher", f"{agreement.cosine:.3f}", "1"))
    for k, share in ((10, agreement.top10), (100, agreement.top100)):
        if share is not None:
            rows.append((f"teacher's top {k} {of_documents}", f"{share:.1%}", "100 %"))
    return [*rows, ("queries/s, one at a time", *rates), ("size", *megabytes)]


def expected_kept(agreement: Agreement, student: str) -> str:
    """State which share of its teacher's nDCG@10 a student is expected to keep, or why this is unknown.

    `student` is a recipe, or a model.
    """
    low, high = MEASURED_OVERLAPS
    unknown = "its share of the teacher's nDCG@10 is unknown"
    if student not in MEASURED_STUDENTS:
        return f"{unknown}: it was measured for tables only"
    if agreement.teacher_bytes is None:
        return f"{unknown}: the teacher's documents are not available, and texts were searched instead"
    if agreement.top10 is None or agreement.documents < MAX_DOCUMENTS:
        return f"{unknown}: fewer than {MAX_DOCUMENTS:,} documents, or no held-out text"
    if round(agreement.top10, 2) < low:
        return f"{unknown}: every table that was measured finds {low:.0%} of the teacher's top 10, or more"
    kept_share = KEPT_START + KEPT_PER_OVERLAP * min(agreement.top10, high)
    least, most = (f"{min(share, 1):.0%}" for share in (kept_share - KEPT_ERROR, kept_share + KEPT_ERROR))
    source = f"by {MEASURED_COLLECTIONS} public collections"
    return f"expected to keep {least} to {most} of the teacher's nDCG@10, {source}"


def _held_out(query_embeddings: Artifact) -> tuple[list[str], Float[ndarray, "queries dim"]]:
    """Sample at most MAX_AGREEMENT_QUERIES held-out texts, evenly from all parts, with teacher embeddings."""
    held_out = _rows_of_split(query_embeddings, "validation")
    rows = held_out[_places(len(held_out), MAX_AGREEMENT_QUERIES)]
    table = _rows_at(query_embeddings, "embeddings", rows, ["query", "embedding"])
    return table["query"].to_pylist(), arrow.to_numpy(table["embedding"])


def _rows_of_split(query_embeddings: Artifact, split: str) -> Int[ndarray, " rows"]:
    parts = query_embeddings.table_parts("embeddings")
    splits = [query_embeddings.table(part, ["split"])["split"] for part in parts]
    rows: ndarray = np.flatnonzero(pc.equal(pa.chunked_array(splits, pa.string()), split))
    return rows


def _searched_embeddings(
    query_embeddings: Artifact,
    dataset: Artifact | None,
    dual_encoder: Artifact | None,
    embeddings: Artifact | None,
) -> Float[ndarray, "docs dim"]:
    """Return embeddings, normalised as in search, of at most MAX_DOCUMENTS evenly spaced documents."""
    from scalingnote.encode.encoder import Encoder

    similarity = "cosine" if dual_encoder is None else tower_similarity(dual_encoder)
    teacher_record = {} if embeddings is None else embeddings.manifest.parents.get("dual_encoder", {})
    if embeddings is not None and teacher_record.get("digest") == (dual_encoder and dual_encoder.digest):
        rows = _places(embeddings.counts["documents"], MAX_DOCUMENTS)
        vectors = arrow.to_numpy(_rows_at(embeddings, "embeddings", rows, [INDEXED_VIEW])[INDEXED_VIEW])
        return arrow.as_searched(vectors.astype(np.float32), similarity)
    if dual_encoder is None or dataset is None:
        training_rows = _rows_of_split(query_embeddings, "train")
        rows = training_rows[_places(len(training_rows), MAX_DOCUMENTS)]
        texts = _rows_at(query_embeddings, "embeddings", rows, ["embedding"])
        return arrow.l2_normalize(arrow.to_numpy(texts["embedding"]))
    rows = _places(dataset.counts["documents"], MAX_DOCUMENTS)
    documents = _rows_at(dataset, "documents", rows, ["title", "topic", "content"])
    views, problems = Encoder.load(dual_encoder.directory("document")).encode_rows(documents)
    if problems:
        reason = next(iter(problems.values()))
        log.warning("%d of %d documents cannot be encoded: %s", len(problems), len(rows), reason)
    return arrow.as_searched(views[indexed_view([*views])], similarity)


def _places(total: int, most: int) -> Int[ndarray, " places"]:
    """Return at most `most` of `total` row numbers, evenly spaced."""
    return np.arange(min(total, most)) * total // max(min(total, most), 1)


def _rows_at(artifact: Artifact, table: str, rows: Int[ndarray, " rows"], columns: list[str]) -> pa.Table:
    """Read rows of a table by their ascending numbers; parts without any are not read."""
    firsts = artifact.first_rows(table)
    by_part = np.split(rows, np.searchsorted(rows, [*firsts.values()][1:]))
    tables = [
        artifact.table(part, columns).take(pa.array(inside - first))
        for (part, first), inside in zip(firsts.items(), by_part, strict=True)
        if len(inside)
    ]
    return pa.concat_tables(tables or [artifact.table(next(iter(firsts)), columns).slice(0, 0)])


def median_ms(function: Callable[[str], object], texts: Sequence[str]) -> float:
    """Measure the median milliseconds of a call, one text at a time."""
    for text in texts[:WARM_UP_TEXTS]:
        function(text)
    times = []
    for text in texts:
        start = time.perf_counter()
        function(text)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
