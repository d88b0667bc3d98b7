"""The index family: how a vector is stored and scanned, as trainable faiss indexes.

Built directly, never by faiss's index factory: that turns on polysemous training, 13 times slower for equal
recall.
"""

from typing import Any

import faiss

from scalingnote.errors import ConfigError
from scalingnote.index.config import IVFPQ, Family, FastScan, Flat, RaBitQ, Refine, ScalarQuantized

INNER_PRODUCT = faiss.METRIC_INNER_PRODUCT
FAST_SCAN_BITS = 4


def lists(family: Family, coarse: Any, *, dim: int, nlist: int) -> Any | None:
    """The untrained inverted lists of a family over a coarse quantizer; None where there are none."""
    index: Any
    match family:
        case FastScan():
            index = faiss.IndexIVFPQFastScan(
                coarse, dim, nlist, sub_quantizers(family, dim), FAST_SCAN_BITS, INNER_PRODUCT
            )
            index.by_residual = True  # off by default; at equal bytes it finds 4 points more, for 8 % of time
        case IVFPQ():
            index = faiss.IndexIVFPQ(
                coarse, dim, nlist, sub_quantizers(family, dim), family.nbits, INNER_PRODUCT
            )
        case ScalarQuantized():
            eight_bits = faiss.ScalarQuantizer.QT_8bit
            index = faiss.IndexIVFScalarQuantizer(coarse, dim, nlist, eight_bits, INNER_PRODUCT)
        case RaBitQ():
            index = faiss.IndexIVFRaBitQFastScan(coarse, dim, nlist, INNER_PRODUCT)
        case Flat():
            return None
    index.own_fields = False
    if isinstance(family, FastScan | IVFPQ):
        index.pq.cp.min_points_per_centroid = 1
    return index


def kept_vectors(family: Family, *, dim: int) -> Any | None:
    """An untrained store of vectors for scoring candidates anew; None where the family keeps none."""
    match refine(family):
        case "none":
            return None
        case "sq8":
            return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, INNER_PRODUCT)
        case "flat":
            return faiss.IndexFlatIP(dim)


def refine(family: Family) -> Refine:
    """What a family keeps beside its codes; a flat index is nothing but the vectors it keeps."""
    match family:
        case ScalarQuantized():
            return "none"
        case Flat():
            return "flat"
        case _:
            return family.refine


def sub_quantizers(family: FastScan | IVFPQ, dim: int) -> int:
    """As configured, or one per 2 dimensions of 4 bits, per 4 of 8, or fewer if these do not divide dim."""
    width = 2 if isinstance(family, FastScan) else 4
    return family.m or next(m for m in range(max(1, dim // width), 0, -1) if dim % m == 0)


def require_trainable(family: Family, documents: int, *, dim: int, nlist: int) -> None:
    """Refuse settings that this many training vectors of this dimension cannot serve."""
    if documents < nlist:
        raise ConfigError(
            f"index.nlist={nlist} needs as many training documents, found {documents}: lower index.nlist"
        )
    if not isinstance(family, FastScan | IVFPQ):
        return
    if dim % sub_quantizers(family, dim):
        fits = sub_quantizers(family.model_copy(update={"m": None}), dim)
        raise ConfigError(
            f"index.family.m={family.m} does not divide the embeddings' dim {dim}: set index.family.m={fits}"
        )
    bits = FAST_SCAN_BITS if isinstance(family, FastScan) else family.nbits
    if documents < 1 << bits:
        raise ConfigError(
            f"codes of {bits} bits need {1 << bits} training documents, found {documents}: "
            "set index.family.kind=flat, or index more documents"
        )
