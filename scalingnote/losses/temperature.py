"""A temperature that is learnt."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Scores of cosines stay between -100 and 100.
LOWEST, HIGHEST = 0.01, 1.0


class Temperature(nn.Module):
    """exp of one parameter, kept within bounds."""

    def __init__(self, start: float) -> None:
        super().__init__()
        # One element rather than none: sharding strategies cut parameters along their first axis.
        self.log = nn.Parameter(torch.tensor([math.log(start)]))

    def forward(self) -> Float[Tensor, ""]:
        """The temperature. Its gradient passes the bounds, so that it can come back from them."""
        log = self.log.float()  # DeepSpeed holds it in half precision
        inside = log.clamp(math.log(LOWEST), math.log(HIGHEST))
        return (log + (inside - log).detach()).exp().squeeze()
