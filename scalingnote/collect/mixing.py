"""Mixing: how much of each of the four sources stays, and how much each of its rows weighs in training."""

import numpy as np
import pyarrow as pa

from scalingnote.collect.config import Mixing, Share
from scalingnote.collect.triplet import share
from scalingnote.storage.schema import TRIPLETS


def mix(triplets: pa.Table, mixing: Mixing, *, seed: int) -> tuple[pa.Table, dict[str, int]]:
    """TRIPLETS with their weights, less what sampling left out; counts per source before and after.

    A row stays or goes by the hash of its query, positive and source, so a larger share keeps every row
    that a smaller one kept.
    """
    sources = [
        f"{s}_{h}" for s, h in zip(triplets["source"].to_pylist(), triplets["hop"].to_pylist(), strict=True)
    ]
    shares: dict[str, Share] = {name: getattr(mixing, name) for name in set(sources)}
    weights = np.array([shares[name].weight for name in sources], dtype=np.float32)
    kept = np.ones(len(sources), dtype=bool)
    if any(found.sample < 1 for found in shares.values()):
        pairs = zip(triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), sources, strict=True)
        kept = np.array(
            [share("\x1f".join(row), seed=seed) < shares[row[2]].sample for row in pairs], dtype=bool
        )
    counts = {f"{name}_offered": sources.count(name) for name in sorted(shares)}
    counts |= {name: int(kept[[source == name for source in sources]].sum()) for name in sorted(shares)}
    at = TRIPLETS.get_field_index("weight")
    table = triplets.set_column(at, TRIPLETS.field(at), pa.array(weights))
    return table.filter(pa.array(kept)), counts
