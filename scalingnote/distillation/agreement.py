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
import torch
from jaxtyping import Float
from numpy import ndarray

from scalingnote import topk
from scalingnote.distillation.config import StudentValidation
from scalingnote.distillation.prepare import VALIDATION
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.log import get_logger
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.train.collectives import broadcast_numbers
from scalingnote.train.data import Store, permuted
from scalingnote.train.engine import Engine
from scalingnote.train.validation import INDEXED_VIEW, encode_rows

MAX_QUERIES = 1000  # held-out texts that are compared
MAX_DOCUMENTS = 1000  # of the corpus that are encoded to be searched: half a minute with a small teacher
TIMED_QUERIES, WARM_UP_QUERIES = 64, 3


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
        get_logger("distill").info("no query has the validation split: nothing is measured in training")
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
    """Quality, speed and size of a student and its teacher."""

    queries: int
    """Held-out texts; without any, cosine and overlaps are 0."""
    documents: int
    """Documents searched."""
    cosine: float
    """Mean cosine of both embeddings of a text."""
    top10: float
    """Share of the teacher's ten best documents among the student's ten best."""
    top100: float
    student_queries_per_s: float
    """One query at a time, by the median time, on this machine under its present load."""
    teacher_queries_per_s: float
    student_bytes: int
    teacher_bytes: int


def compare(
    dataset: Artifact, dual_encoder: Artifact, query_embeddings: Artifact, student: Artifact
) -> Agreement:
    """Compare a finished student with its teacher, on held-out texts and a sample of the documents."""
    from scalingnote.encode.encoder import Encoder

    texts, teacher = _held_out(query_embeddings)
    tower = QueryEncoder.load(student.directory("query"))
    queries = Encoder.load(dual_encoder.directory("query"))
    cosine = top10 = top100 = 0.0
    documents = _sampled_documents(dataset)
    if texts:
        embeddings, teacher = arrow.l2_normalize(tower.encode_queries(texts)), arrow.l2_normalize(teacher)
        views = Encoder.load(dual_encoder.directory("document")).encode_documents(documents)
        searched = arrow.l2_normalize(views.get(INDEXED_VIEW, next(iter(views.values()))))
        cosine = float((embeddings * teacher).sum(axis=1).mean())
        top10, top100 = (neighbour_overlap(teacher, embeddings, searched, k=k) for k in (10, 100))
    timed = (texts or ["how to join two tensors"])[:TIMED_QUERIES]
    return Agreement(
        queries=len(texts),
        documents=len(documents),
        cosine=cosine,
        top10=top10,
        top100=top100,
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
    """Rows of a table: the name of a measure, the student's value, the teacher's."""
    megabytes = [f"{size / 1e6:,.1f} MB" for size in (agreement.student_bytes, agreement.teacher_bytes)]
    rates = [f"{rate:,.0f}" for rate in (agreement.student_queries_per_s, agreement.teacher_queries_per_s)]
    return [
        ("mean cosine to the teacher", f"{agreement.cosine:.3f}", "1"),
        (f"teacher's top 10 of {agreement.documents:,} documents", f"{agreement.top10:.1%}", "100 %"),
        ("teacher's top 100", f"{agreement.top100:.1%}", "100 %"),
        ("queries/s, one at a time", *rates),
        ("size", *megabytes),
    ]


def _held_out(query_embeddings: Artifact) -> tuple[list[str], Float[ndarray, "queries dim"]]:
    """The first held-out texts and the teacher's embeddings of them."""
    texts: list[str] = []
    embeddings: list[ndarray] = []
    for part in query_embeddings.table_parts("embeddings"):
        table = query_embeddings.table(part, ["query", "split", "embedding"])
        table = table.filter(pa.compute.equal(table["split"], "validation"))
        texts += table["query"].to_pylist()
        embeddings.append(arrow.to_numpy(table["embedding"]))
        if len(texts) >= MAX_QUERIES:
            break
    return texts[:MAX_QUERIES], np.concatenate(embeddings)[:MAX_QUERIES]


def _sampled_documents(dataset: Artifact) -> pa.Table:
    """Documents at equal distances in the dataset, at most 1,000."""
    total = dataset.counts["documents"]
    step, taken, seen = max(total // MAX_DOCUMENTS, 1), [], 0
    for batch in dataset.batches("documents", columns=["title", "topic", "content"]):
        places = np.arange(-seen % step, len(batch), step)
        taken.append(pa.Table.from_batches([batch]).take(pa.array(places)))
        seen += len(batch)
    return pa.concat_tables(taken).slice(0, MAX_DOCUMENTS)


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
