"""Scaling laws of dense retrieval: contrastive entropy as a function of model size and of data size.

    L(N) = (C/N)^α + δ        L(D) = (C/D)^α + δ        L(N, D) = [(A/N)^(α/β) + B/D]^β + δ

N counts parameters without embeddings, D training pairs (ScalingNote, section 4.4; the joint law is that of
Kaplan et al., 2020, Eq. 1.5, over a floor δ).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Sizes = float | Values


@dataclass(frozen=True)
class PowerLaw:
    """Of one size, the other held (Eq. 18, 19)."""

    c: float
    alpha: float
    delta: float

    def __call__(self, size: Sizes) -> Values:
        """Contrastive entropy at so many parameters, or so many pairs."""
        return np.asarray((self.c / np.asarray(size)) ** self.alpha + self.delta)


@dataclass(frozen=True)
class Split:
    """How a budget is spent best: so many parameters on so many pairs, and the entropy that this gives."""

    parameters: float
    data: float
    entropy: float


@dataclass(frozen=True)
class JointLaw:
    """Of both sizes (Eq. 20)."""

    a: float
    b: float
    alpha: float
    beta: float
    delta: float

    @property
    def inner(self) -> float:
        """α/β, the exponent that Eq. 20 prints beside N."""
        return self.alpha / self.beta

    def __call__(self, parameters: Sizes, data: Sizes) -> Values:
        """Contrastive entropy of a model of so many parameters trained on so many pairs."""
        size = (self.a / np.asarray(parameters)) ** self.inner
        return np.asarray((size + self.b / np.asarray(data)) ** self.beta + self.delta)

    def split(self, budget: float, *, per_parameter: float) -> Split:
        """The N and D of least entropy with budget = per_parameter · N · D operations.

        Along that line the least is where α/β (A/N)^(α/β) = B/D.
        """
        product = budget / per_parameter
        parameters = (self.inner * self.a**self.inner * product / self.b) ** (1 / (1 + self.inner))
        data = product / parameters
        return Split(parameters, data, float(self(parameters, data)))


# As printed: Qwen2.5 on the Small set of Xiaohongshu, entropy among sampled negatives of its validation set.
PUBLISHED_SIZE = PowerLaw(c=3.82e5, alpha=0.14, delta=0.18)
PUBLISHED_DATA = PowerLaw(c=2.60e3, alpha=0.14, delta=1.4e-7)
PUBLISHED_JOINT = JointLaw(a=3.15e5, b=1.16e2, alpha=0.12 * 0.770, beta=0.770, delta=0.108)
