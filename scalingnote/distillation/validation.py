"""Measure a student on held-out queries while it trains: how near its embeddings are to the teacher's.

ScalingNote reports the held-out distillation loss of its students (Table 6). The cosine does not depend on
the length of embeddings, so it compares students of all losses; it chooses the best checkpoint.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from scalingnote.distillation.config import StudentValidation
from scalingnote.log import get_logger
from scalingnote.storage import vectors
from scalingnote.train import validation
from scalingnote.train.order import permuted
from scalingnote.train.stream import Store

TABLE = "validation"  # of the store: rows as those of training, which no step draws


def validator(
    store: Store,
    engine: validation.Measured,
    config: StudentValidation | None,
    *,
    pad: int,
    packed: bool,
    device: torch.device,
    seed: int,
) -> Callable[[], dict[str, float]] | None:
    """A function that measures the student as it is now; None where nothing is to be measured.

    Every rank must call it at the same step. `pad` is the student's pad token.
    """
    rows = store.tables.get(TABLE, ())
    if config is None or not len(rows):
        if config is not None:
            get_logger("distill").info("no query has the validation split: nothing is measured in training")
        return None
    rows = store[TABLE]
    size = min(config.queries, len(rows))
    drawn = permuted(np.arange(size), size=len(rows), key=(seed % 2**64, 0))
    queries, teacher = rows.tokens(drawn), rows.values("teacher", drawn)

    def validate() -> dict[str, float]:
        found = validation.encode("query", queries, engine=engine, pad=pad, packed=packed, device=device)
        return validation.agreed(measure(found[:, 0], teacher), device)

    return validate


def measure(
    student: Float[ndarray, "queries dim"], teacher: Float[ndarray, "queries dim"]
) -> dict[str, float]:
    """Mean cosine to the teacher's embeddings, and mean squared distance from them."""
    cosine = (vectors.unit(student) * vectors.unit(teacher)).sum(axis=1)
    distance = ((student - teacher) ** 2).sum(axis=1)
    return {"cosine": float(cosine.mean()), "squared_distance": float(distance.mean())}
