"""Query encoder: one interface to query towers in all their forms.

    torch       the tower as trained, in the precision that the hardware multiplies fastest
    compiled    the same through torch.compile: for GPUs, and large batches on a CPU
    onnx        its ONNX graph in float32
    onnx_int8   its ONNX graph with 8-bit products: the fastest transformer on a CPU
    lookup      the mean of rows of a table: no model is run

Each form imports only what it needs: a lookup needs numpy and tokenizers, neither torch nor pydantic.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from scalingnote.array_types import Float, Float32
from scalingnote.encode.lookup import LookupEncoder
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import published_model
from scalingnote.texts import checked_texts

if TYPE_CHECKING:
    from scalingnote.encode.config import Form
    from scalingnote.models.weights import Precision

PUBLISHED = ("native", "sentence_transformers")  # kinds of towers that keep their own head
Encode = Callable[[Sequence[str]], Float32[ndarray, "queries dim"]]
EncodeIds = Callable[[Sequence[Sequence[int]]], Float32[ndarray, "queries dim"]]


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

    def __init__(
        self,
        encode: Encode,
        encode_ids: EncodeIds | None,
        *,
        max_tokens: int,
        dim: int,
        form: str,
        cache: int = 0,
    ) -> None:
        """Wrap the functions of a tower; with `cache` > 0, that many embeddings of texts are cached.

        Args:
            encode: embeddings of queries.
            encode_ids: embeddings of queries given by token ids, without special tokens, of the tower's
                tokenizer, never from the cache; None: the tower reads a query only as text.
            max_tokens: tokens of a query that are read, special ones not counted.
            dim: width of the embeddings.
            form: of the tower.
            cache: number of embeddings to cache.
        """
        self.dim, self.form, self.max_tokens = dim, form, max_tokens
        self.encode_ids = encode_ids
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
            tower: Any = LookupEncoder(folder)
        else:
            from scalingnote.models.onnx import FILES, OnnxTower

            if form not in FILES:
                return _torch(
                    folder, form, threads=threads, precision=precision, token_budget=token_budget, cache=cache
                )
            tower = OnnxTower.load(folder, form, threads=threads)
        return cls(
            tower.encode,
            tower.encode_token_ids,
            max_tokens=tower.max_tokens,
            dim=tower.dim,
            form=form,
            cache=cache,
        )

    def encode_queries(self, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
        """Query embeddings [queries, dim], not normalised; of any number of queries, also none.

        Half of a surrogate pair is read as U+FFFD. DataError for what is no text, see :func:`checked_texts`.
        """
        texts = checked_texts(queries, name="query")
        return self._encode(texts) if texts else np.empty((0, self.dim), np.float32)


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
    modules = published_model.read_modules(folder, "query")
    if modules is None:
        raise ArtifactError(f"{folder} is not a tower: tower.json and modules.json are missing")
    if modules[0].name in published_model.TABLES:
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
    folder: Path, form: str, *, threads: int | None, precision: "Precision", token_budget: int, cache: int
) -> QueryEncoder:
    import torch

    from scalingnote.encode.encoder import Encoder

    if threads is not None:
        torch.set_num_threads(threads)
    encoder = Encoder.load(folder, "query", token_budget=token_budget, precision=precision)
    if form == "compiled":
        # Padded, because packed batches almost never repeat a shape, and each new shape is compiled.
        encoder.tower.packs = False
        compiled: Any = torch.compile(encoder.tower.backbone, dynamic=True)
        encoder.tower.backbone = compiled

    def encode_ids(queries: Sequence[Sequence[int]]) -> Float32[ndarray, "queries dim"]:
        return np.asarray(encoder.encode_token_ids(queries)[:, 0], np.float32)

    return QueryEncoder(
        encoder.encode_queries,
        encode_ids if encoder.tower.prompt.takes_ids else None,
        max_tokens=encoder.tower.prompt.max_tokens,
        dim=encoder.dim,
        form=form,
        cache=cache,
    )
