"""What keeps term weights sparse."""

from jaxtyping import Float
from torch import Tensor


def flops(means: Float[Tensor, " vocabulary"]) -> Float[Tensor, ""]:
    """Sum of squared mean weights of the terms over a batch's documents (LightRetriever, Eq. 9).

    It estimates the multiplications of scoring two documents drawn at random, and so falls hardest on
    terms that many documents have.
    """
    return means.square().sum()


def ramp(progress: float | Float[Tensor, ""], share: float) -> float | Float[Tensor, ""]:
    """Factor of a regulariser: grows as a square from 0 to 1 over the first `share` of a run, then stays.

    `progress` is the part of the run that is done. Terms must be learnt before they are weighed.
    """
    if not share:
        return 1.0
    done = progress / share
    return done.clamp(max=1.0).square() if isinstance(done, Tensor) else min(done, 1.0) ** 2
