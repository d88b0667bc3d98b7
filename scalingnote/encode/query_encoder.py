"""Query encoder: one interface to query towers in all their forms.

    torch       the tower as trained, in the precision that the hardware multiplies fastest
    compiled    the same tower by torch.compile: for GPUs, and large batches on a CPU
    onnx        its ONNX graph in float32
    onnx_int8   its ONNX graph with 8-bit products: the fastest transformer on a CPU
    lookup      the mean of rows of a table: no model is run

Each form imports only the packages that it needs: a lookup needs numpy and tokenizers, not torch or pydantic.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from scalingnote.core.array_types import Float, Float32
from scalingnote.core.errors import ArtifactError, ConfigError, explained_imports
from scalingnote.core.model_files import local_folder
from scalingnote.core.words import checked_texts
from scalingnote.encode.lookup import LookupEncoder
from scalingnote.models import published_model

if TYPE_CHECKING:
    from scalingnote.encode.config import Form
    from scalingnote.models.weights import Precision

PUBLISHED_KINDS = ("native", "sentence_transformers")  # kinds of towers that keep their own head
EncodeQueries = Callable[[Sequence[str]], Float32[ndarray, "queries dim"]]
EncodeIds = Callable[[Sequence[Sequence[int]]], Float32[ndarray, "queries dim"]]


class QueryCache:
    """The embeddings of the last `size` queries (LRU): a few queries make up much of the traffic."""

    def __init__(self, encode: EncodeQueries, size: int) -> None:
        self._encode, self._size = encode, size
        self._entries: OrderedDict[str, ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Encode queries; those that are not in the cache are computed together, each once."""
        with self._lock:
            cached = {query: self._entries[query] for query in queries if query in self._entries}
            for query in cached:
                self._entries.move_to_end(query)
            self.hits += sum(query in cached for query in queries)
            self.misses += sum(query not in cached for query in queries)
        missing = list(dict.fromkeys(query for query in queries if query not in cached))
        if missing:  # outside the lock, so that other threads can use the cache meanwhile
            new = dict(zip(missing, self._encode(missing), strict=True))
            cached |= new
            with self._lock:
                # Copies, because a row of a matrix would keep the entire matrix in memory.
                self._entries.update((query, vector.copy()) for query, vector in new.items())
                self._forget()
        return np.stack([cached[query] for query in queries])

    def resize(self, size: int) -> None:
        """Set the maximum number of queries to `size`."""
        with self._lock:
            self._size = size
            self._forget()

    def _forget(self) -> None:
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)


class QueryEncoder:
    """Encoder of texts to embeddings in the teacher's space: a query tower in one of its forms.

    Args:
        path: a folder that :func:`scalingnote.distill` wrote, or the query tower of a run.
        form: the form to load; auto: the fastest, see :func:`choose`.
        threads: of a transformer, by default OMP_NUM_THREADS; with torch they apply to the entire process.
        precision: of the forms torch and compiled.
        token_budget: maximum tokens of a forward pass, of the forms torch and compiled.
        cache: number of embeddings of texts to cache; 0: no cache.

    Attributes:
        folder: folder of the tower.
        dim: width of the embeddings.
        form: the form that was loaded.
        max_tokens: maximum tokens of a query that are read, without special tokens.
        encode_ids: function from token ids of queries, of the tower's tokenizer and without special tokens,
            to embeddings, never from the cache; None: the tower reads a query only as text.
        cache: the cache; None: there is no cache.

    Raises:
        ArtifactError: the folder has no query tower, or not in this form.
        ConfigError: the folder cannot encode queries.
        MissingPackageError: a tower that is a model needs the extra `train` or `serve`; a table does not.
    """

    def __init__(
        self,
        path: str | Path,
        form: "Form" = "auto",
        *,
        threads: int | None = None,
        precision: "Precision" = "auto",
        token_budget: int = 8192,
        cache: int = 0,
    ) -> None:
        self.folder = folder = Path(path)
        with explained_imports():
            available = forms(folder)
            self.form = choose(available) if form == "auto" else form
            if self.form not in available:
                names = ", ".join(available)
                raise ArtifactError(f"{folder} has no query tower as {form!r}, only as {names}")
            if self.form == "lookup":
                tower: Any = LookupEncoder(folder)
            elif self.form in ("onnx", "onnx_int8"):
                from scalingnote.models.onnx import OnnxTower

                tower = OnnxTower.load(folder, self.form, threads=threads)
            else:
                tower = _TorchTower(
                    folder, self.form, threads=threads, precision=precision, token_budget=token_budget
                )
        self.dim: int = tower.dim
        self.max_tokens: int = tower.max_tokens
        self.encode_ids: EncodeIds | None = tower.encode_token_ids
        self._compute: EncodeQueries = tower.encode
        self.cache: QueryCache | None = None
        self.resize_cache(cache)

    def encode_anew(self, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
        """Encode queries like :meth:`encode_queries`, but never from the cache."""
        return self._compute(checked_texts(queries, name="query"))

    def resize_cache(self, size: int) -> None:
        """Set the size of the cache to `size` texts; the most recently used ones are kept. 0: no cache."""
        if self.cache is not None and size:
            self.cache.resize(size)
        else:
            self.cache = QueryCache(self._compute, size) if size else None
        self._encode = self.cache.encode if self.cache else self._compute

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, revision: str | None = None, **settings: Any
    ) -> "QueryEncoder":
        """Load a query encoder from a folder or from the hub, without the model that encodes documents.

        Args:
            model: folder or hub id.
            revision: branch, tag or commit on the hub.
            **settings: further arguments of the class.

        Raises:
            ConfigError: `model` is not a folder and not a model that the hub provides.
        """
        return cls(local_folder(model, revision=revision, role="query"), **settings)

    def push_to_hub(self, repo_id: str, *, private: bool = False) -> str:
        """Upload the folder, with the model that encodes documents if there is one; return the commit's URL.

        The repository is created if it does not exist. The token is that of ``hf auth login`` or HF_TOKEN.
        """
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(repo_id, private=private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo_id, folder_path=self.folder, commit_message="Upload a query encoder"
        )
        return str(commit.commit_url)

    def encode(
        self, queries: str | Sequence[str], *, normalize: bool = True
    ) -> Float32[ndarray, "queries dim"]:
        """Encode queries, in their order.

        Args:
            queries: one text or several; an empty text has an embedding, too. Half of a surrogate pair is
                read as U+FFFD, the same as in documents.
            normalize: scale every embedding to length 1, because documents are searched by cosine.

        Returns:
            float32, a row per query; one row for a single text.

        Raises:
            DataError: a query is not a text (None, NaN, a number); the message has its position and value.
        """
        texts = [queries] if isinstance(queries, str) else queries
        embeddings = np.asarray(self.encode_queries(texts), np.float32)
        if normalize:
            embeddings = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
        return embeddings

    def encode_queries(self, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
        """Encode any number of queries, also none, without normalisation.

        Half of a surrogate pair is read as U+FFFD.

        Raises:
            DataError: a query is not a text, see :func:`checked_texts`.
        """
        texts = checked_texts(queries, name="query")
        return self._encode(texts) if texts else np.empty((0, self.dim), np.float32)


class _TorchTower:
    """A tower of the forms torch and compiled."""

    def __init__(
        self, folder: Path, form: str, *, threads: int | None, precision: "Precision", token_budget: int
    ) -> None:
        import torch

        from scalingnote.encode.encoder import Encoder

        if threads is not None:
            torch.set_num_threads(threads)
        encoder = Encoder.load(folder, "query", token_budget=token_budget, precision=precision)
        if form == "compiled":
            # Padded, because packed batches almost never repeat a shape, and every new shape is compiled.
            encoder.tower.packs = False
            compiled: Any = torch.compile(encoder.tower.backbone, dynamic=True)
            encoder.tower.backbone = compiled
        prompt = encoder.tower.prompt
        self.dim, self.max_tokens = encoder.dim, prompt.max_tokens
        self.encode = encoder.encode_queries
        self.encode_token_ids = self._encode_ids if prompt.takes_ids else None
        self._encoder = encoder

    def _encode_ids(self, queries: Sequence[Sequence[int]]) -> Float32[ndarray, "queries dim"]:
        return np.asarray(self._encoder.encode_token_ids(queries)[:, 0], np.float32)


def forms(folder: Path) -> "list[Form]":
    """List the forms of the query tower in a folder: of a tower, or of sentence-transformers.

    Raises:
        ArtifactError: the folder is neither of them.
        ConfigError: the folder cannot encode queries.
    """
    try:
        facts = json.loads((folder / "tower.json").read_text())
    except FileNotFoundError:
        return _published_forms(folder)
    if facts["role"] != "query":
        raise ConfigError(f"{folder} has a {facts['role']} tower: it cannot encode queries")
    if facts.get("kind") == "lookup":
        return ["lookup"]
    from scalingnote.models.onnx import ONNX_FILES

    available: list[Form] = [form for form, name in ONNX_FILES.items() if (folder / name).exists()]
    if (folder / "projection.safetensors").exists() or facts.get("kind") in PUBLISHED_KINDS:
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
    """Choose the fastest form: a table, else torch on a GPU, else 8-bit ONNX, else any."""
    if "torch" in available and len(available) > 2 and _has_gpu():
        return "torch"
    order: tuple[Form, ...] = ("lookup", "onnx_int8", "onnx", "torch")
    return next((form for form in order if form in available), "torch")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
