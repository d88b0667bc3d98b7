"""Features as the networks read them: tables of embeddings, with a mark for every row that has a value."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from scalingnote.fuse.config import Vector
from scalingnote.fuse.feature_encoding import MISSING, Encoding
from scalingnote.fuse.network import Slot


class SemanticIds(nn.Module):
    """Embeddings of codes, a table per level that starts as its codebook; a document's is their sum."""

    def __init__(self, codebooks: Float[Tensor, "levels codes dim"]) -> None:
        super().__init__()
        self.levels, self.codes, self.dim = codebooks.shape
        self.tables = nn.Parameter(codebooks.detach().clone().flatten(0, 1))

    def forward(self, codes: Int[Tensor, "*rows levels"]) -> Float[Tensor, "*rows dim"]:
        """The sum over levels; a code of -1 adds nothing."""
        there = codes >= 0
        rows = codes.clamp(min=0) + torch.arange(self.levels, device=codes.device) * self.codes
        return (F.embedding(rows, self.tables) * there.unsqueeze(-1)).sum(dim=-2)


class HashTable(nn.Module):
    """An embedding per bucket; bucket -1 is a missing value."""

    def __init__(self, buckets: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows = nn.Parameter(torch.randn(buckets, width) * width**-0.5)

    def forward(self, bucket: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows width"]:
        """The embedding of each bucket."""
        return F.embedding(bucket.clamp(min=0), self.rows)


class Columns(nn.Module):
    """Declared features: a slot for each."""

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        super().__init__()
        self._sizes = [encoding.numbers for encoding in encodings if encoding.numbers]
        self.tables = nn.ModuleList([HashTable(e.size, _width(e)) for e in encodings if e.size])
        self.widths = [_width(e) for e in encodings if e.size] + self._sizes

    def forward(
        self, indices: Int[Tensor, "rows indices"], numbers: Float[Tensor, "rows numbers"]
    ) -> list[Slot]:
        """Categorical and bucketed features first, then numbers and vectors, each kind as declared."""
        slots = [
            (table(index), index != MISSING)
            for table, index in zip(self.tables, indices.unbind(1), strict=True)
        ]
        for values in numbers.split(self._sizes, dim=1) if self._sizes else ():
            slots.append((values.nan_to_num(), ~values.isnan().any(dim=1)))
        return slots


def _width(encoding: Encoding) -> int:
    assert not isinstance(encoding.feature, Vector)
    return int(getattr(encoding.feature, "width"))  # noqa: B009  # the kinds with a table have one
