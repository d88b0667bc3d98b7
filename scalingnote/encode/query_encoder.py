"""Query encoder: one interface to query towers in all their forms.

    torch       the tower as trained, in the precision that the hardware multiplies fastest
    compiled    the same through torch.compile: for GPUs, and large batches on a CPU
    onnx        its ONNX graph in float32
    onnx_int8   its ONNX graph with 8-bit products: the fastest transformer on a CPU
    lookup      the mean of rows of a table: no model is run

Each form imports only what it needs: a lookup needs numpy and tokenizers, neither torch nor pydantic.

A lookup takes the rows of one query and makes one vector-matrix product; of a batch it takes the rows of 16
queries at once. float16 rows are converted to float32 by shifts of their bits (:func:`_widened`), because
numpy's conversion takes longer than everything else. Measured per query without the tokenizer, one thread,
32,000 rows of 384 in float16, 8 tokens: 7 us alone (10 with numpy's conversion), 2.6 us in batches of 64 and
1,024; there torch's EmbeddingBag takes 1.4 us, with sums rounded to float16, and 2.8 us with learned weights.
Tokenizing a query takes 10 to 30 us, or 2 us from cached words (word_tokenizer.py).
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float32, Int16, Int64
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import library_folder
from scalingnote.models.lookup_table import Table, WordTokenizer

if TYPE_CHECKING:
    from scalingnote.encode.config import Form
    from scalingnote.models.precision import Precision

PUBLISHED = ("native", "sentence_transformers")  # kinds of towers that keep their own head
Encode = Callable[[Sequence[str]], Float32[ndarray, "queries dim"]]


class QueryCache:
    """The embeddings of the last `size` queries (LRU): a few queries make up much of the traffic."""

    def __init__(self, encode: Encode, size: int) -> None:
        self._encode, self._size = encode, size
        self._entries: OrderedDict[str, ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Embeddings of queries; those not in the cache are computed together, each once."""
        with self._lock:
            cached = {query: self._entries[query] for query in queries if query in self._entries}
            for query in cached:
                self._entries.move_to_end(query)
            self.hits += sum(query in cached for query in queries)
            self.misses += sum(query not in cached for query in queries)
        missing = list(dict.fromkeys(query for query in queries if query not in cached))
        if missing:  # outside the lock, so that other threads can look up meanwhile
            new = dict(zip(missing, self._encode(missing), strict=True))
            cached |= new
            with self._lock:
                # Copies: a row of a matrix would keep the whole matrix in memory.
                self._entries.update((query, vector.copy()) for query, vector in new.items())
                while len(self._entries) > self._size:
                    self._entries.popitem(last=False)
        return np.stack([cached[query] for query in queries])


class QueryEncoder:
    """A query tower, ready to encode."""

    def __init__(self, encode: Encode, *, dim: int, form: str, cache: int = 0) -> None:
        """Wrap a function that encodes queries; with `cache` > 0, that many embeddings are cached."""
        self.dim, self.form = dim, form
        self.cache = QueryCache(encode, cache) if cache else None
        self._encode = self.cache.encode if self.cache else encode

    @classmethod
    def load(
        cls,
        folder: Path,
        form: "Form" = "auto",
        *,
        threads: int | None = None,
        precision: "Precision" = "auto",
        token_budget: int = 8192,
        cache: int = 0,
    ) -> "QueryEncoder":
        """The query tower of a folder.

        Args:
            folder: holds the tower in one or more forms, see :func:`forms`.
            form: the form to load; auto takes the fastest, see :func:`choose`.
            threads: of a transformer, by default OMP_NUM_THREADS; with torch they hold for the whole process.
            precision: of the forms torch and compiled.
            token_budget: maximum tokens of a forward pass, of the forms torch and compiled.
            cache: number of query embeddings to cache; 0 for none.

        Raises:
            ArtifactError: the folder does not hold the form.
            ConfigError: the folder cannot encode queries, or a package is missing.
        """
        available = forms(folder)
        form = choose(available) if form == "auto" else form
        if form not in available:
            raise ArtifactError(f"{folder} holds no query tower as {form!r}, it holds {', '.join(available)}")
        if form == "lookup":
            table = LookupEncoder(folder)
            return cls(table.encode, dim=table.dim, form=form, cache=cache)
        from scalingnote.models.onnx import FILES, OnnxTower

        if form in FILES:
            graph = OnnxTower.load(folder, form, threads=threads)
            return cls(graph.encode, dim=graph.dim, form=form, cache=cache)
        encode, dim = _torch(folder, form, threads=threads, precision=precision, token_budget=token_budget)
        return cls(encode, dim=dim, form=form, cache=cache)

    def encode_queries(self, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
        """Query embeddings [queries, dim], not normalised; of any number of queries, also none."""
        if not len(queries):
            return np.empty((0, self.dim), np.float32)
        return self._encode(queries)


def forms(folder: Path) -> "list[Form]":
    """The forms in which a folder holds a query tower: a tower's folder, or one of sentence-transformers.

    ArtifactError if it is neither, ConfigError if it cannot encode queries.
    """
    try:
        facts = json.loads((folder / "tower.json").read_text())
    except FileNotFoundError:
        return _published_forms(folder)
    if facts["role"] != "query":
        raise ConfigError(f"{folder} holds a {facts['role']} tower: it cannot encode queries")
    if facts.get("kind") == "lookup":
        return ["lookup"]
    from scalingnote.models.onnx import FILES

    available: list[Form] = [form for form, name in FILES.items() if (folder / name).exists()]
    if (folder / "projection.safetensors").exists() or facts.get("kind") in PUBLISHED:
        available += ["torch", "compiled"]
    return available


def _published_forms(folder: Path) -> "list[Form]":
    modules = library_folder.read_modules(folder, "query")
    if modules is None:
        raise ArtifactError(f"{folder} is not a tower: tower.json and modules.json are missing")
    if modules[0].name in library_folder.TABLES:
        return ["lookup"]
    return ["torch", "compiled"]


def choose(available: "Sequence[Form]") -> "Form":
    """The fastest of the forms in a folder: a table, else torch on a GPU, else 8-bit ONNX, else any."""
    if "torch" in available and len(available) > 2 and _has_gpu():
        return "torch"
    order: tuple[Form, ...] = ("lookup", "onnx_int8", "onnx", "torch")
    return next((form for form in order if form in available), "torch")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _torch(
    folder: Path, form: str, *, threads: int | None, precision: "Precision", token_budget: int
) -> tuple[Encode, int]:
    import torch

    from scalingnote.encode.encoder import Encoder
    from scalingnote.models import published_tower
    from scalingnote.models.tower import Tower

    if threads is not None:
        torch.set_num_threads(threads)
    saved = (folder / "tower.json").exists()
    tower = Tower.load(folder) if saved else published_tower.open_published(folder, "query")
    encoder = Encoder(tower, token_budget=token_budget, precision=precision)
    if form == "compiled":
        # Padded, because packed batches almost never repeat a shape, and each new shape is compiled.
        encoder.tower.packs = False
        compiled: Any = torch.compile(encoder.tower.backbone, dynamic=True)
        encoder.tower.backbone = compiled
    return encoder.encode_queries, encoder.dim


# --- lookup table -----------------------------------------------------------------------------------

_BATCH_QUERIES = 16  # their rows fit in a core's cache (18 tokens of 384 dimensions: 440 KB)
_MAX_CACHED_SHARES = 128  # arrays of equal shares are made once for queries of fewer tokens
_WIDENED_SCALE = np.float32(2.0**112)  # the exponents of float16 are biased by 15, those of float32 by 127
_WIDENED_BITS = np.int32(-0x70002000)  # 0x8fffe000: the sign, 5 bits of the exponent, 10 of the mantissa


class LookupEncoder:
    """A lookup table, ready to encode queries."""

    def __init__(self, folder: Path) -> None:
        """Open a table.

        Args:
            folder: a folder written by :meth:`Table.write`, or a published one with a table for queries.

        Raises:
            ArtifactError: `folder` holds no table.
            ConfigError: its table cannot be read alone (:func:`static_embedding.read`).
        """
        published = None if (folder / "tower.json").exists() else library_folder.read_table(folder)
        self._table = table = Table.read(folder) if published is None else published.table
        tokenizer = Tokenizer.from_str(table.tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = WordTokenizer(tokenizer)
        self.dim = table.values.shape[1]
        # The plain array behind the memory map: every slice of np.memmap creates another np.memmap.
        self._values, self._scales = np.asarray(table.values), table.scales
        self._weights, self._features = table.token_weights, table.features
        self._halves: ndarray | None = None
        self._unit = np.float32(1)  # factor that `_looked_up` leaves to the caller
        if self._values.dtype == np.float16:
            self._halves, self._unit = self._values.view(np.int16), _WIDENED_SCALE
        self._equal = [np.full(n, self._unit / max(n, 1), np.float32) for n in range(_MAX_CACHED_SHARES)]
        self._empty: ndarray | None = None if published is None else published.empty
        self._attention: tuple[ndarray, ndarray] | None = None
        if table.attention is not None:
            self._attention = (table.attention[0] / np.sqrt(np.float32(self.dim)), table.attention[1])

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Query embeddings, not normalised, of at least one query."""
        rows = self._tokenizer.ids(queries, self._table.max_length)
        if self._features is not None:
            rows = [self._features.extend(ids) for ids in rows]
        if len(rows) == 1:
            return self._one(rows[0])[np.newaxis]
        if self._attention is not None:
            return np.stack([self._one(ids) for ids in rows])
        return self._batch(rows)

    def _one(self, ids: list[int]) -> Float32[ndarray, " dim"]:
        if not ids:
            return self._mean_row()
        numbers = np.array(ids)
        shares = self._shares(numbers)
        if self._attention is not None:
            rows = self._rows(numbers)
            shares = shares / self._unit
            attended: ndarray = shares @ rows + _attended(rows, shares, *self._attention)
            return attended
        if self._scales is not None:
            shares = shares * self._scales[numbers]
        mean: ndarray = shares @ self._looked_up(numbers)
        return mean

    def _batch(self, rows: Sequence[list[int]]) -> Float32[ndarray, "queries dim"]:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        numbers = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
        shares = self._batch_shares(numbers, lengths)
        ends = [0, *lengths.cumsum().tolist()]
        means = np.zeros((len(rows), self.dim), np.float32)
        for first in range(0, len(rows), _BATCH_QUERIES):
            last = min(first + _BATCH_QUERIES, len(rows))
            offset = ends[first]
            values = self._looked_up(numbers[offset : ends[last]])
            for query in range(first, last):
                start, stop = ends[query], ends[query + 1]
                np.dot(shares[start:stop], values[start - offset : stop - offset], out=means[query])
        if not lengths.all():
            means[lengths == 0] = self._mean_row()
        return means

    def _shares(self, numbers: Int64[ndarray, " tokens"]) -> Float32[ndarray, " tokens"]:
        """The weight of each token in the mean of one query, times `_unit`."""
        if self._weights is None:
            count = len(numbers)
            if count < _MAX_CACHED_SHARES:
                return self._equal[count]
            return np.full(count, self._unit / count, np.float32)
        weights = self._weights[numbers]
        shares: ndarray = weights * (self._unit / weights.sum())
        return shares

    def _batch_shares(
        self, numbers: Int64[ndarray, " tokens"], lengths: Int64[ndarray, " queries"]
    ) -> Float32[ndarray, " tokens"]:
        """The same for the concatenated tokens of several queries, times the scales of integer rows."""
        shares: ndarray
        if self._weights is None:
            shares = (self._unit / np.maximum(lengths, 1)).astype(np.float32).repeat(lengths)
        else:
            weights, query = self._weights[numbers], np.arange(len(lengths)).repeat(lengths)
            totals = np.bincount(query, weights, minlength=len(lengths))
            shares = weights * (self._unit / np.maximum(totals, np.finfo(np.float32).tiny))[query]
        if self._scales is not None:
            shares = shares * self._scales[numbers]
        return shares.astype(np.float32, copy=False)

    def _looked_up(self, numbers: Int64[ndarray, " tokens"]) -> Float32[ndarray, "tokens dim"]:
        """Stored rows in float32; the table's rows are these times `_unit` and times their scales."""
        if self._halves is not None:
            return _widened(self._halves.take(numbers, axis=0))
        return self._values.take(numbers, axis=0).astype(np.float32, copy=False)

    def _rows(self, numbers: Int64[ndarray, " tokens"]) -> Float32[ndarray, "tokens dim"]:
        """The table's rows of these tokens."""
        rows: ndarray = self._looked_up(numbers) * self._unit
        return rows if self._scales is None else rows * self._scales[numbers, np.newaxis]

    def _mean_row(self) -> Float32[ndarray, " dim"]:
        """The embedding of a query without tokens; computed on demand, because it reads the whole table."""
        if self._empty is None:
            self._empty = self._table.mean_row()
        return self._empty


def _widened(halves: Int16[ndarray, "tokens dim"]) -> Float32[ndarray, "tokens dim"]:
    """float16, given by their bits, as float32 / 2**112; exact for all finite values.

    Sign, exponent and mantissa have the same order in both formats: a shift by 13 bits moves the last two to
    their places, and the mask clears three copies of the sign beside the sign bit.
    """
    bits = halves.astype(np.int32)
    bits <<= 13
    bits &= _WIDENED_BITS
    return bits.view(np.float32)


def _attended(
    rows: Float32[ndarray, "tokens dim"],
    shares: Float32[ndarray, " tokens"],
    score: Float32[ndarray, "dim dim"],
    out: Float32[ndarray, "dim dim"],
) -> Float32[ndarray, " dim"]:
    """Mean over one query's tokens of their self-attention output; only the mean is multiplied by `out`."""
    scores = rows @ score @ rows.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    mean: ndarray = shares @ weights @ rows @ out
    return mean
