"""How closely a student reproduces its teacher: while it trains, and when it is finished.

    validator   held-out queries ─► student ─► cosine to, and squared distance from, the teacher's embeddings
    compare     held-out texts ─► student, teacher ─► cosine, and the overlap of the documents that they find

No relevance judgement is needed: a student that finds the teacher's documents in the teacher's order has lost
nothing. ScalingNote reports the held-out distillation loss of its students (Table 6). The cosine does not
depend on the length of embeddings, so it compares students of all losses; it chooses the best checkpoint.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.distillation.config import StudentValidation
from scalingnote.distillation.prepare import VALIDATION
from scalingnote.encode.documents import tower_similarity
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.log import elapsed_status, get_logger, status_lines
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.train.collectives import broadcast_numbers
from scalingnote.train.data import Store, permuted
from scalingnote.train.engine import Engine
from scalingnote.train.validation import INDEXED_VIEW, encode_rows

MAX_QUERIES = 1000  # held-out texts that are compared
MAX_DOCUMENTS = 1000  # of the corpus that are encoded to be searched: half a minute with a small teacher
TIMED_QUERIES, WARM_UP_QUERIES = 64, 3
log = get_logger("distill")


def validator(
    store: Store,
    engine: Engine,
    config: StudentValidation | None,
    *,
    pad: int,
    packed: bool,
    device: torch.device,
    seed: int,
    cosine_weight: float = 1.0,
) -> Callable[[], dict[str, float]] | None:
    """A function that measures the student as it is when called; None without held-out queries.

    Every rank must call it at the same step. `pad` is the student's pad token, `cosine_weight` the lambda of
    Eq. 15.
    """
    if config is None:
        return None
    rows = store[VALIDATION]
    if not len(rows):
        log.info("no query has the validation split: nothing is measured in training")
        return None
    size = min(config.queries, len(rows))
    drawn = permuted(np.arange(size), size=len(rows), key=(seed % 2**64, 0))
    queries, teacher = rows.tokens(drawn), rows.values("teacher", drawn)

    def validate() -> dict[str, float]:
        embeddings = encode_rows("query", queries, engine=engine, pad=pad, packed=packed, device=device)
        return broadcast_numbers(
            measure_embeddings(embeddings[:, 0], teacher, cosine_weight=cosine_weight), device
        )

    return validate


def measure_embeddings(
    student: Float[ndarray, "queries dim"], teacher: Float[ndarray, "queries dim"], *, cosine_weight: float
) -> dict[str, float]:
    """Mean cosine to the teacher's embeddings, squared distance from them, and `qkd` of both (Eq. 15)."""
    cosine = (arrow.l2_normalize(student) * arrow.l2_normalize(teacher)).sum(axis=1)
    distance = ((student - teacher) ** 2).sum(axis=1)
    qkd = (distance - cosine_weight * cosine).mean()
    means = {"cosine": cosine.mean(), "squared_distance": distance.mean(), "qkd": qkd}
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
    """Share of the teacher's ten best documents among the student's ten best; None if there are no more."""
    top100: float | None
    student_queries_per_s: float
    """One query at a time, by the median time, on this machine under its present load."""
    teacher_queries_per_s: float
    student_bytes: int
    teacher_bytes: int

    def measures(self) -> dict[str, float]:
        """What was measured of the agreement, by name."""
        values = {"cosine": self.cosine, "overlap@10": self.top10, "overlap@100": self.top100}
        return {name: value for name, value in values.items() if value is not None}


def compare(
    dataset: Artifact,
    dual_encoder: Artifact,
    query_embeddings: Artifact,
    student: Artifact,
    embeddings: Artifact | None = None,
) -> Agreement:
    """Compare a finished student with its teacher, on samples of the held-out texts and of the documents.

    The documents' `embeddings` are read if the teacher made some, else a sample of the dataset is encoded.
    """
    from scalingnote.encode.encoder import Encoder

    texts, teacher = _held_out(query_embeddings)
    tower = QueryEncoder.load(student.directory("query"))
    with status_lines("distill", elapsed_status("comparing the student with its teacher")):
        queries = Encoder.load(dual_encoder.directory("query"))
        cosine, overlap, documents = None, {}, 0
        if texts:
            embedded, teacher = arrow.l2_normalize(tower.encode_queries(texts)), arrow.l2_normalize(teacher)
            cosine = float((embedded * teacher).sum(axis=1).mean())
            searched = _document_embeddings(dataset, dual_encoder, embeddings)
            documents = len(searched)
            ks = [k for k in (10, 100) if k < documents]
            overlap = {k: neighbour_overlap(teacher, embedded, searched, k=k) for k in ks}
        timed = (texts or ["how to join two tensors"])[:TIMED_QUERIES]
        return Agreement(
            queries=len(texts),
            documents=documents,
            cosine=cosine,
            top10=overlap.get(10),
            top100=overlap.get(100),
            student_queries_per_s=1000 / median_ms(lambda text: tower.encode_queries([text]), timed),
            teacher_queries_per_s=1000 / median_ms(lambda text: queries.encode_queries([text]), timed),
            student_bytes=_bytes_of(student.directory("query")),
            teacher_bytes=_bytes_of(dual_encoder.directory("query")),
        )


def neighbour_overlap(
    teacher: Float[ndarray, "texts dim"],
    student: Float[ndarray, "texts dim"],
    searched: Float[ndarray, "docs dim"],
    *,
    k: int,
) -> float:
    """Mean share of the teacher's `k` nearest neighbours among `searched` that are the student's as well."""
    (_, ours), (_, theirs) = (topk.search(queries, searched, k=k) for queries in (student, teacher))
    return float((theirs[:, :, None] == ours[:, None, :]).any(axis=2).mean())


def comparison_rows(agreement: Agreement) -> list[tuple[str, ...]]:
    """Rows of a table, each a measure that is known: its name, the student's value, the teacher's."""
    megabytes = [f"{size / 1e6:,.1f} MB" for size in (agreement.student_bytes, agreement.teacher_bytes)]
    rates = [f"{rate:,.0f}" for rate in (agreement.student_queries_per_s, agreement.teacher_queries_per_s)]
    of_documents = f"of {agreement.documents:,} documents"
    rows: list[tuple[str, ...]] = []
    if agreement.cosine is not None:
        rows.append(("mean cosine to the teacher", f"{agreement.cosine:.3f}", "1"))
    for k, share in ((10, agreement.top10), (100, agreement.top100)):
        if share is not None:
            rows.append((f"teacher's top {k} {of_documents}", f"{share:.1%}", "100 %"))
    return [*rows, ("queries/s, one at a time", *rates), ("size", *megabytes)]


def _held_out(query_embeddings: Artifact) -> tuple[list[str], Float[ndarray, "queries dim"]]:
    """At most MAX_QUERIES held-out texts, from all parts alike, and the teacher's embeddings of them."""
    parts = query_embeddings.table_parts("embeddings")
    splits = [query_embeddings.table(part, ["split"])["split"] for part in parts]
    held_out = np.flatnonzero(pc.equal(pa.chunked_array(splits, pa.string()), "validation"))
    rows = held_out[_places(len(held_out), MAX_QUERIES)]
    table = _rows_at(query_embeddings, "embeddings", rows, ["query", "embedding"])
    return table["query"].to_pylist(), arrow.to_numpy(table["embedding"])


def _document_embeddings(
    dataset: Artifact, dual_encoder: Artifact, embeddings: Artifact | None
) -> Float[ndarray, "docs dim"]:
    """Embeddings, as search compares them, of at most MAX_DOCUMENTS documents at equal distances."""
    from scalingnote.encode.encoder import Encoder

    similarity = tower_similarity(dual_encoder)
    made_by = {} if embeddings is None else embeddings.manifest.parents.get("dual_encoder", {})
    if embeddings is not None and made_by.get("digest") == dual_encoder.digest:
        rows = _places(embeddings.counts["documents"], MAX_DOCUMENTS)
        found = arrow.to_numpy(_rows_at(embeddings, "embeddings", rows, [INDEXED_VIEW])[INDEXED_VIEW])
        return arrow.as_searched(found.astype(np.float32), similarity)
    rows = _places(dataset.counts["documents"], MAX_DOCUMENTS)
    documents = _rows_at(dataset, "documents", rows, ["title", "topic", "content"])
    views, problems = Encoder.load(dual_encoder.directory("document")).encode_rows(documents)
    if problems:
        reason = next(iter(problems.values()))
        log.warning("%d of %d documents cannot be encoded: %s", len(problems), len(rows), reason)
    return arrow.as_searched(views.get(INDEXED_VIEW, next(iter(views.values()))), similarity)


def _places(total: int, most: int) -> Int[ndarray, " places"]:
    """At most `most` of `total` row numbers, at equal distances."""
    return np.arange(min(total, most)) * total // max(min(total, most), 1)


def _rows_at(artifact: Artifact, table: str, rows: Int[ndarray, " rows"], columns: list[str]) -> pa.Table:
    """Rows of a table by their ascending numbers; parts without any are not read."""
    firsts = artifact.first_rows(table)
    by_part = np.split(rows, np.searchsorted(rows, [*firsts.values()][1:]))
    taken = [
        artifact.table(part, columns).take(pa.array(inside - first))
        for (part, first), inside in zip(firsts.items(), by_part, strict=True)
        if len(inside)
    ]
    return pa.concat_tables(taken or [artifact.table(next(iter(firsts)), columns).slice(0, 0)])


def median_ms(function: Callable[[str], object], texts: Sequence[str]) -> float:
    """Milliseconds of a call, one text at a time."""
    for text in texts[:WARM_UP_QUERIES]:
        function(text)
    times = []
    for text in texts:
        start = time.perf_counter()
        function(text)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
