"""Query towers of every form behind one door: strings in, embeddings out.

    torch       the tower as it was trained, in the precision that the hardware multiplies fastest
    compiled    the same through torch.compile: for GPUs, and large batches on a CPU
    onnx        its ONNX graph in float32
    onnx_int8   its ONNX graph with 8-bit products: the fastest transformer on a CPU
    lookup      a table and a mean: no model at all

Only what a form needs is imported: a lookup needs numpy and tokenizers, no torch, no pydantic.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float32
from numpy import ndarray

from scalingnote.encode.cache import Cache
from scalingnote.encode.lookup import LookupEncoder
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import module_list

if TYPE_CHECKING:
    from scalingnote.encode.config import Form
    from scalingnote.models.precision import Precision

PUBLISHED = ("native", "sentence_transformers")  # kinds of towers that keep their own head
Encode = Callable[[Sequence[str]], Float32[ndarray, "queries dim"]]


class QueryEncoder:
    """A query tower, ready to encode."""

    def __init__(self, encode: Encode, *, dim: int, form: str, cache: int = 0) -> None:
        """`cache` embeddings of the queries asked last are kept."""
        self.dim, self.form = dim, form
        self.cache = Cache(encode, cache) if cache else None
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
        """The query tower of a folder, in one of the forms that lie there.

        `auto` takes the fastest: see :func:`choose`. `threads` of a transformer, by default what
        OMP_NUM_THREADS says; in torch's forms they are those of the whole process. `precision` and
        `token_budget` are torch's.
        ArtifactError when the folder does not hold the form, ConfigError when a package is missing.
        """
        there = forms(folder)
        form = choose(there) if form == "auto" else form
        if form not in there:
            raise ArtifactError(f"{folder} holds no query tower as {form!r}, it holds {', '.join(there)}")
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
        """Query embeddings, not normalised."""
        if not len(queries):
            return np.empty((0, self.dim), np.float32)
        return self._encode(queries)


def forms(folder: Path) -> "list[Form]":
    """The forms that a folder holds its query tower in: a tower's folder, or one of sentence-transformers.

    ArtifactError when it is neither, ConfigError when it cannot encode queries.
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

    found: list[Form] = [form for form, name in FILES.items() if (folder / name).exists()]
    if (folder / "projection.safetensors").exists() or facts.get("kind") in PUBLISHED:
        found += ["torch", "compiled"]
    return found


def _published_forms(folder: Path) -> "list[Form]":
    modules = module_list.read(folder, "query")
    if modules is None:
        raise ArtifactError(f"{folder} is not a tower: tower.json and modules.json are missing")
    if modules[0].name in module_list.TABLES:
        return ["lookup"]
    return ["torch", "compiled"]


def choose(there: "Sequence[Form]") -> "Form":
    """The fastest of the forms in a folder: a table, else the tower itself on a GPU, else 8-bit, else any."""
    if "torch" in there and len(there) > 2 and _has_gpu():
        return "torch"
    order: tuple[Form, ...] = ("lookup", "onnx_int8", "onnx", "torch")
    return next((form for form in order if form in there), "torch")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _torch(
    folder: Path, form: str, *, threads: int | None, precision: "Precision", token_budget: int
) -> tuple[Encode, int]:
    import torch

    from scalingnote.encode.encoder import Encoder
    from scalingnote.models import native_tower
    from scalingnote.models.tower import Tower

    if threads is not None:
        torch.set_num_threads(threads)
    saved = (folder / "tower.json").exists()
    tower = Tower.load(folder) if saved else native_tower.published(folder, "query")
    encoder = Encoder(tower, token_budget=token_budget, precision=precision)
    if form == "compiled":
        # Padded: the shapes of packed rows are never met twice.
        encoder.tower.packs = False
        compiled: Any = torch.compile(encoder.tower.backbone, dynamic=True)
        encoder.tower.backbone = compiled
    return encoder.encode_queries, encoder.dim
