"""Embeddings of the queries asked last: a few queries make up much of the traffic, and never change."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

Encode = Callable[[Sequence[str]], Float32[ndarray, "queries dim"]]


class Cache:
    """Keeps the `size` embeddings used last; a hit is the very vector that was computed."""

    def __init__(self, encode: Encode, size: int) -> None:
        self._encode, self._size = encode, size
        self._kept: OrderedDict[str, ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Embeddings; those not kept are computed together, each once."""
        with self._lock:
            found = {query: self._kept[query] for query in queries if query in self._kept}
            for query in found:
                self._kept.move_to_end(query)
            self.hits += sum(query in found for query in queries)
            self.misses += sum(query not in found for query in queries)
        missing = list(dict.fromkeys(query for query in queries if query not in found))
        if missing:  # outside the lock: others may look up while this computes
            new = dict(zip(missing, self._encode(missing), strict=True))
            found |= new
            with self._lock:
                # Copies: a row of a matrix would keep the whole of it.
                self._kept.update((query, vector.copy()) for query, vector in new.items())
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
        return np.stack([found[query] for query in queries])
