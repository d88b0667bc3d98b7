"""Knobs of a search."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config


class Joining(Config):
    """How dense and sparse candidates become one answer (see :mod:`scalingnote.hybrid`)."""

    kind: Literal["interpolation", "reciprocal_rank"] = "interpolation"
    dense_weight: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of dense scores, sparse ones have the rest; None: as the index was tuned, else 0.5",
    )
    candidates: int = Field(100, ge=1, le=1000, description="fetched by either side, at least k")
    k: int = Field(60, ge=0, description="of reciprocal ranks: 1 / (k + rank)")
