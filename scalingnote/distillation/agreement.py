"""How far a student agrees with its teacher on texts that neither training nor a user's judgements have seen.

    held-out texts -> student, teacher -> cosine; the documents that each finds

No judgement is needed: a student that finds the teacher's documents in the teacher's order has lost nothing.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.storage import vectors
from scalingnote.storage.artifact import Artifact

MAX_QUERIES = 1000  # held-out texts that are compared
MAX_DOCUMENTS = 1000  # of the corpus that are encoded to be searched: half a minute with a small teacher
TIMED_QUERIES = 64


@dataclass(frozen=True)
class Agreement:
    """A student beside its teacher."""

    queries: int
    """Held-out texts; 0 where there are none, and the next three are then 0."""
    documents: int
    """Documents searched."""
    cosine: float
    """Mean cosine of both embeddings of a text."""
    top10: float
    """Share of the teacher's ten best documents among the student's ten best."""
    top100: float
    student_queries_per_s: float
    """One query at a time, as this machine is loaded now."""
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
    documents = _sample(dataset)
    if texts:
        found, teacher = vectors.unit(tower.encode_queries(texts)), vectors.unit(teacher)
        pool = Encoder.load(dual_encoder.directory("document")).encode_documents(documents)
        embedded = vectors.unit(pool.get("summary", next(iter(pool.values()))))
        cosine = float((found * teacher).sum(axis=1).mean())
        top10, top100 = (overlap(found @ embedded.T, teacher @ embedded.T, k=k) for k in (10, 100))
    timed = (texts or ["how to join two tensors"])[:TIMED_QUERIES]
    return Agreement(
        queries=len(texts),
        documents=len(documents),
        cosine=cosine,
        top10=top10,
        top100=top100,
        student_queries_per_s=_rate(tower.encode_queries, timed),
        teacher_queries_per_s=_rate(queries.encode_queries, timed),
        student_bytes=_size(student.directory("query")),
        teacher_bytes=_size(dual_encoder.directory("query")),
    )


def overlap(
    student: Float[ndarray, "queries docs"], teacher: Float[ndarray, "queries docs"], *, k: int
) -> float:
    """Mean share of the teacher's `k` best documents that are among the student's `k` best."""
    k = min(k, teacher.shape[1])
    ours, theirs = (np.argpartition(-scores, k - 1, axis=1)[:, :k] for scores in (student, teacher))
    return statistics.mean(len(np.intersect1d(a, b)) / k for a, b in zip(ours, theirs, strict=True))


def rows(found: Agreement) -> list[tuple[str, ...]]:
    """What is told of a student: a name, the student's value, the teacher's."""
    megabytes = [f"{size / 1e6:,.1f} MB" for size in (found.student_bytes, found.teacher_bytes)]
    rates = [f"{rate:,.0f}" for rate in (found.student_queries_per_s, found.teacher_queries_per_s)]
    return [
        ("mean cosine to the teacher", f"{found.cosine:.3f}", "1"),
        (f"teacher's top 10 of {found.documents:,} documents", f"{found.top10:.1%}", "100 %"),
        ("teacher's top 100", f"{found.top100:.1%}", "100 %"),
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
        embeddings.append(vectors.to_numpy(table["embedding"]))
        if len(texts) >= MAX_QUERIES:
            break
    return texts[:MAX_QUERIES], np.concatenate(embeddings)[:MAX_QUERIES]


def _sample(dataset: Artifact) -> pa.Table:
    """Documents from all over the dataset."""
    total = dataset.counts["documents"]
    step, taken, seen = max(total // MAX_DOCUMENTS, 1), [], 0
    for batch in dataset.batches("documents", columns=["title", "topic", "content"]):
        places = np.arange(-seen % step, len(batch), step)
        taken.append(pa.Table.from_batches([batch]).take(pa.array(places)))
        seen += len(batch)
    return pa.concat_tables(taken).slice(0, MAX_DOCUMENTS)


def _rate(encode: Callable[[Sequence[str]], Any], queries: Sequence[str]) -> float:
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        for query in queries:
            encode([query])
        rates.append(len(queries) / (time.perf_counter() - start))
    return statistics.median(rates)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
