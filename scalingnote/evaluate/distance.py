"""How far a student is from its teacher: their embeddings of the same queries come in, distances go out.

Both papers bound what a student loses by the distance of its query embeddings from the teacher's: with a
shared document tower the risk grows by at most ``2K/n * sum ||q_stu - q||`` (ScalingNote, Eq. 17;
EmbedDistill, Eq. 4), where K bounds the length of embeddings. Searching compares embeddings of length 1, so
here K is 1.
"""

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.storage import vectors

K = 1.0
BINS = 60


def distances(
    student: Float[ndarray, "queries dim"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, float | int]:
    """Mean distance, the bound's term and the mean cosine at length 1; and the distance of what towers give.

    The last one is what query distillation makes small (ScalingNote, Eq. 15).
    """
    ours, theirs = vectors.unit(student), vectors.unit(teacher)
    mean = float(np.linalg.norm(ours - theirs, axis=1).mean())
    return {
        "queries": len(ours),
        "mean": mean,
        "bound": 2 * K * mean,
        "cosine": float(np.einsum("qd,qd->q", ours, theirs).mean()),
        "mean_as_given": float(np.linalg.norm(student - teacher, axis=1).mean()),
    }


def discrepancy(
    student: Float[ndarray, "queries own"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, Any]:
    """Histogram over all pairs of the teacher's distance less the student's (EmbedDistill, Fig. 3).

    Around 0 where the student keeps the teacher's geometry, turned or mirrored as it may be: the two may have
    different dimensions. Embeddings are of length 1, so it lies in [-2, 2].
    """
    found = _pair_distances(teacher) - _pair_distances(student)
    end = max(float(np.abs(found).max(initial=0.0)), 1e-6)
    counts, edges = np.histogram(found, bins=BINS, range=(-end, end))
    return {
        "pairs": len(found),
        "mean": float(found.mean()),
        "deviation": float(found.std()),
        "counts": counts.tolist(),
        "edges": edges.tolist(),
    }


def _pair_distances(embeddings: Float[ndarray, "queries dim"]) -> Float[ndarray, " pairs"]:
    units = vectors.unit(embeddings).astype(np.float64)
    squared = 2 - 2 * (units @ units.T)[np.triu_indices(len(units), k=1)]
    return np.sqrt(np.maximum(squared, 0))
