"""The projection: pooled states to embeddings, in float32 whatever its weight is held in."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class Projection(nn.Linear):
    """W, no bias. All losses compare what it gives, which half precision would round.

    The weight is raised here and not by the caller: ZeRO-3 gathers it for the module's own forward pass only.
    """

    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__(hidden, dim, bias=False)

    def forward(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... dim"]:
        """Embeddings. Callers switch autocast off, which would round them all the same."""
        return F.linear(states.float(), self.weight.float())
