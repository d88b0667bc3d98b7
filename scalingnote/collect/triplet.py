"""A triplet (query, positive, hard negatives), and the seeded hash behind every choice of this room."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple


class Triplet(NamedTuple):
    """What one query teaches: rank `positive` above each of `negatives` (doc_ids)."""

    positive: str
    negatives: list[str]


def draw(candidates: Iterable[str], count: int, *, seed: int, key: str) -> list[str]:
    """Up to `count` of `candidates`, every subset equally likely: those whose hash with `key` is smallest.

    No generator is carried along, so a draw depends neither on the order of the candidates nor on what
    was drawn before it, on whichever machine.
    """
    return sorted(set(candidates), key=lambda candidate: _hash(seed, key, candidate))[:count]


def share(key: str, *, seed: int) -> float:
    """A number in [0, 1) that belongs to `key`: uniform over keys."""
    return int.from_bytes(_hash(seed, key)) / 2**64


def _hash(*parts: object) -> bytes:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
