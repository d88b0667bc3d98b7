"""Distance between a student's query embeddings and its teacher's.

Both papers bound the loss of a student by the distance of its query embeddings from the teacher's: with a
shared document tower the risk grows by at most ``2K/n * sum ||q_stu - q||`` (ScalingNote, Eq. 17;
EmbedDistill, Eq. 4), where K bounds the length of embeddings. Search compares embeddings of length 1, so K
is 1 here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray

from scalingnote.evaluate.lineage import Ancestor
from scalingnote.evaluate.query_embeddings import QueryEmbeddings
from scalingnote.storage import arrow

EMBEDDING_BOUND = 1.0
HISTOGRAM_BINS = 60
SPLITS = ("train", "validation")


def distances(
    student: Float[ndarray, "queries dim"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, float | int]:
    """Mean distance, bound and mean cosine at length 1, and the mean distance of unnormalized embeddings.

    The last one is the loss of query distillation (ScalingNote, Eq. 15).
    """
    student_units, teacher_units = arrow.l2_normalize(student), arrow.l2_normalize(teacher)
    mean = float(np.linalg.norm(student_units - teacher_units, axis=1).mean())
    return {
        "queries": len(student_units),
        "mean": mean,
        "bound": 2 * EMBEDDING_BOUND * mean,
        "cosine": float(np.einsum("qd,qd->q", student_units, teacher_units).mean()),
        "mean_as_given": float(np.linalg.norm(student - teacher, axis=1).mean()),
    }


def discrepancy(
    student: Float[ndarray, "queries own"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, Any]:
    """Histogram over pairs of queries of the teacher's distance minus the student's (EmbedDistill, Fig. 3).

    It is centred at 0 if the student keeps the teacher's geometry up to rotation and reflection, so the two
    may have different dimensions. Embeddings have length 1, so values are in [-2, 2].
    """
    differences = _pair_distances(teacher) - _pair_distances(student)
    end = max(float(np.abs(differences).max(initial=0.0)), 1e-6)
    counts, edges = np.histogram(differences, bins=HISTOGRAM_BINS, range=(-end, end))
    return {
        "pairs": len(differences),
        "mean": float(differences.mean()),
        "deviation": float(differences.std()),
        "counts": counts.tolist(),
        "edges": edges.tolist(),
    }


def _pair_distances(embeddings: Float[ndarray, "queries dim"]) -> Float[ndarray, " pairs"]:
    units = arrow.l2_normalize(embeddings).astype(np.float64)
    squared = 2 - 2 * (units @ units.T)[np.triu_indices(len(units), k=1)]
    return np.sqrt(np.maximum(squared, 0))


def sample_teacher_queries(
    ancestors: Sequence[Ancestor], *, queries: int, seed: int
) -> dict[str, QueryEmbeddings]:
    """The queries a student was trained and validated on, with the teacher's stored embeddings.

    Parts hold queries by the hash of their ids, so a few parts are a fair sample of all.

    Args:
        ancestors: the lineage of the student.
        queries: maximum number per split.
        seed: of the sample.

    Returns:
        Split -> sample; empty if the teacher's embeddings are gone.
    """
    stored = [a.artifact for a in ancestors if a.kind == "query_embeddings" and a.artifact]
    if not stored or not queries:
        return {}
    rng = np.random.default_rng(seed)
    samples: dict[str, list[pa.Table]] = {split: [] for split in SPLITS}
    for name in rng.permutation(stored[-1].table_parts("embeddings")).tolist():
        table = stored[-1].table(name, columns=["query", "split", "embedding"])
        for split, chosen in samples.items():
            mine = np.flatnonzero(pc.equal(table["split"], split).to_numpy())
            missing = queries - sum(map(len, chosen))
            chosen.append(table.take(np.sort(rng.permutation(mine)[:missing])))
        if all(sum(map(len, chosen)) == queries for chosen in samples.values()):
            break
    tables = {split: pa.concat_tables(chosen) for split, chosen in samples.items()}
    return {
        split: QueryEmbeddings(table["query"].to_pylist(), arrow.to_numpy(table["embedding"]))
        for split, table in tables.items()
        if len(table)
    }


def distance_section(teacher: Mapping[str, QueryEmbeddings], student: QueryEmbeddings) -> dict[str, Any]:
    """The section of report.json: distances per split, and the discrepancy of the last split with pairs."""
    student_of = {split: student.of(sample.queries) for split, sample in teacher.items()}
    splits = {
        split: distances(student_of[split], sample.embeddings)
        for split, sample in teacher.items()
        if student_of[split].shape[1] == sample.embeddings.shape[1]
    }
    last = next((split for split in reversed([*teacher]) if len(student_of[split]) > 1), None)
    pairs = last and {"split": last, **discrepancy(student_of[last], teacher[last].embeddings)}
    return {"splits": splits, "discrepancy": pairs}
