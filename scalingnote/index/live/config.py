"""Knobs of live updates."""

from pydantic import Field

from scalingnote.config import Config


class LiveConfig(Config):
    """How an index takes writes and when it is written anew."""

    merge_rows: int = Field(
        1024, ge=1, description="rows of a shard searched exactly before they are merged into lists"
    )
    segment_bytes: int = Field(
        64 << 20, ge=1, description="size at which a file of a log is closed and the next begun"
    )
    compact_at: float | None = Field(
        None,
        gt=0,
        description="compact in the background once rows written or gone since the version are this share of "
        "its rows; None: only when asked to",
    )
    retrain_at: float = Field(
        0.5,
        gt=0,
        description="train centroids and codebooks anew once documents written since are this share of the "
        "index: each write pays for a bounded number of trainings",
    )
    keep_versions: int = Field(
        2,
        ge=1,
        description="versions that can be made current again, those that were it last, and their logs",
    )


DEFAULTS = LiveConfig()
