"""The network of one side: an embedding and features in, an embedding out that does not need the features.

    out = unit(embedding + gate * network(embedding, features))        gate starts at 0 (ReZero)

Where a feature is missing, a learnt row stands in its place. Where all are, the embedding comes out as it
went in, bit for bit.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from scalingnote.fuse.config import Cross, Mlp, Network

# The values of a feature and which rows have one.
Slot = tuple[Float[Tensor, "rows _"], Bool[Tensor, " rows"]]


class Fusion(nn.Module):
    """The residual path of either side; without features it is nothing but the embedding."""

    def __init__(self, config: Network, *, dim: int, widths: Sequence[int], hide: float = 0.0) -> None:
        """`widths` of the features; training hides each of a row with chance `hide`."""
        super().__init__()
        self._hide = hide
        self.missing = nn.ParameterList([nn.Parameter(torch.zeros(width)) for width in widths])
        self.network = build(config, width=dim + sum(widths), dim=dim) if widths else None
        self.gate = nn.Parameter(torch.zeros(dim)) if widths else None

    def forward(
        self, embeddings: Float[Tensor, "rows dim"], features: Sequence[Slot]
    ) -> Float[Tensor, "rows dim"]:
        """Unit embeddings in, unit embeddings out."""
        if self.network is None or self.gate is None:
            return embeddings
        present = torch.stack([there for _, there in features], dim=1)
        if self.training and self._hide:
            present = present & (torch.rand(present.shape, device=present.device) >= self._hide)
        slots = [
            torch.where(there[:, None], values, missing)
            for (values, _), there, missing in zip(features, present.unbind(1), self.missing, strict=True)
        ]
        # What is added is small at first: bfloat16 products are exact enough, a sum in them would not be.
        correction = self.network(torch.cat([embeddings, *slots], dim=1)).float()
        fused = F.normalize(embeddings + self.gate * correction, dim=-1)
        return torch.where(present.any(dim=1, keepdim=True), fused, embeddings)


def build(config: Network, *, width: int, dim: int) -> nn.Module:
    """A network from `width` inputs to `dim` outputs."""
    match config:
        case Mlp():
            return _layers(width, config.hidden, dim)
        case Cross():
            return nn.Sequential(
                *(_CrossLayers(width, config.layers, config.rank), _layers(width, config.hidden, dim))
            )


def _layers(width: int, hidden: Sequence[int], dim: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for size in hidden:
        parts += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*parts, nn.Linear(width, dim))


class _CrossLayers(nn.Module):
    """x' = x0 * (U V x + b) + x, the low-rank cross layer (Wang et al. 2021, Eq. 2)."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(width, rank, bias=False) for _ in range(layers)])
        self.up = nn.ModuleList([nn.Linear(rank, width) for _ in range(layers)])

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        start = x
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return x
