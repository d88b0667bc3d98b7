"""Engines that compute embeddings from the token rows of documents, behind one interface, and their results.

    own                     Encoder: packed rows, every view, the sparse head
    sentence-transformers   the modules of the library, padded rows, the indexed view
    vllm                    vLLM pools the transformer's states, this package applies the dense layers

Each engine receives the rows that CPUs tokenised, so parts, records, counts and rejected documents do not
depend on the engine. The second and third read the files of sentence-transformers in the folder of a document
tower: those of a published model, of its Router's document route, or those saved with a trained tower.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core.errors import ConfigError
from scalingnote.models.prompt import DocumentPrompt, TokenRow, indexed_view

if TYPE_CHECKING:
    from scalingnote.encode.config import EncodeConfig
    from scalingnote.encode.encoder import Encoder
    from scalingnote.models.published_model import PublishedModel
    from scalingnote.storage.artifact import Artifact

MODULES = {"sentence-transformers": "sentence_transformers", "vllm": "vllm"}  # package of an engine
VLLM_POOLING = {"cls": "CLS", "mean": "MEAN", "last": "LAST"}  # our name -> vLLM's name
_TOWER = "document/tower.json"


@dataclass(frozen=True)
class Cost:
    """Work of a forward pass."""

    tokens: int = 0  # without padding
    padded: int = 0  # with padding
    flops: float = 0.0  # 0 if the shape of the architecture is unknown
    cut_texts: int = 0  # texts that are longer than the model reads
    lost_tokens: int = 0  # tokens of these texts that are not read

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class TopTerms:
    """Up to k terms of each row by a sparse head, in any order; an impact of 0 means no term."""

    terms: Int[ndarray, "rows k"]
    impacts: Float[ndarray, "rows k"]

    @classmethod
    def empty(cls, rows: int, k: int) -> "TopTerms":
        """Create rows without terms."""
        return cls(np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float16))

    def put(
        self,
        rows: Int[ndarray, " chosen"],
        terms: Int[ndarray, "chosen k"],
        impacts: Float[ndarray, "chosen k"],
    ) -> None:
        """Set the terms of some rows; there are fewer than k if the vocabulary is smaller."""
        width = terms.shape[1]
        self.terms[rows, :width], self.impacts[rows, :width] = terms, impacts

    def columns(self) -> list[pa.Array]:
        """Build the list columns ``terms``, ascending in each row, and ``impacts``."""
        order = np.argsort(self.terms, axis=1, kind="stable")
        terms, impacts = (np.take_along_axis(part, order, axis=1) for part in (self.terms, self.impacts))
        is_term = impacts > 0
        offsets = np.concatenate([[0], is_term.sum(1).cumsum()]).astype(np.int32)
        return [pa.ListArray.from_arrays(offsets, pa.array(part[is_term])) for part in (terms, impacts)]


class RowEncoding(NamedTuple):
    """The result of an engine for some token rows."""

    embeddings: Float[ndarray, "rows views dim"]  # not normalised
    terms: TopTerms | None  # None: the tower has no sparse head
    cost: Cost


@runtime_checkable
class EncoderEngine(Protocol):
    """An encoder of token rows, which a worker loads once."""

    dim: int
    views: tuple[str, ...]  # of the embeddings of a row, in order

    def encode_with_cost(self, rows: Sequence[TokenRow], *, top_k: int = 256) -> RowEncoding:
        """Encode token rows, with a sparse head also to `top_k` terms of largest weight; measure the cost."""

    def peak(self) -> float:
        """Measure FLOPs per second of large matrix products in this process."""


LoadEngine = Callable[["Artifact", int], Any]  # of an artifact and a token budget; an EncoderEngine


def engine_loader(config: "EncodeConfig") -> LoadEngine:
    """Return a function that loads the engine of a config from towers and a token budget, in a worker."""
    loaders: dict[str, LoadEngine] = {
        "own": load_document_encoder,
        "sentence-transformers": load_library,
        "vllm": partial(load_vllm, gpus=max(int(config.resources.gpus_per_worker), 1)),
    }
    return loaders[config.engine]


def check_installed(config: "EncodeConfig") -> None:
    """Check that the engine's package is installed: here, or in a task with the resources of a worker.

    The driver may run on a node without GPUs and from another image than the workers.

    Raises:
        ConfigError: the package is in neither place.
    """
    module = MODULES.get(config.engine)
    if module is None or _is_installed(module):
        return
    from scalingnote.core import cluster  # late: encoders and tasks that tokenise do not need Ray

    if not all(cluster.map_tasks(_is_installed, [module], config.resources)):
        raise ConfigError(
            f"encode.engine is {config.engine}, and the workers have no package {module}: install it in "
            "their image, or set encode.engine to own"
        )


def check_tower(config: "EncodeConfig", towers: "Artifact") -> None:
    """Check that the engine of a config computes its views of a document; read settings, but no weights.

    Raises:
        ConfigError: the engine cannot encode with these towers, or lacks a view.
    """
    views = _views(config, towers)
    if missing := sorted(set(config.views) - set(views)):
        raise ConfigError(
            f"{towers.uri} has no view {missing} of a document with the engine {config.engine}: "
            f"set encode.views to some of {list(views)}"
        )


def _views(config: "EncodeConfig", towers: "Artifact") -> tuple[str, ...]:
    if not towers.names("document/"):  # a cross-encoder, which computes one embedding of a document
        if config.engine != "own":
            raise _refusal(config, towers, "a cross-encoder reads pairs, which only the engine own encodes")
        return ("summary",)
    facts = towers.read_json(_TOWER)
    if config.engine == "own":
        return tuple(facts["views"])
    if facts["sparse"] is not None:
        raise _refusal(config, towers, "its sparse head has terms, which only the engine own computes")
    if "document/modules.json" not in towers.names("document/"):
        raise _refusal(config, towers, "it is saved without the files of sentence-transformers")
    if config.engine == "vllm":
        from scalingnote.models import published_model  # late: it imports the hub's client
        from scalingnote.storage import filesystem as fs

        settings = [name for name in towers.names("document/") if name.endswith(".json")]
        folder = fs.download(towers.uri, settings, version=towers.digest) / "document"
        model = published_model.read(folder, "document")
        if model.unknown:
            raise _refusal(config, towers, f"vLLM has no {model.unknown}")
    return (indexed_view(facts["views"]),)


def _refusal(config: "EncodeConfig", towers: "Artifact", reason: str) -> ConfigError:
    return ConfigError(
        f"encode.engine {config.engine} cannot encode with {towers.uri}: {reason}; set encode.engine to own"
    )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def load_document_prompt(towers: "Artifact") -> DocumentPrompt:
    """Load the prompt of an artifact's document tower, without its weights."""
    return DocumentPrompt.restore(
        towers.read_json(_TOWER), towers.read_bytes("document/tokenizer.json").decode()
    )


def load_document_encoder(towers: "Artifact", token_budget: int) -> "Encoder":
    """Load the encoder of an artifact's document tower."""
    from scalingnote.encode.encoder import Encoder

    return Encoder.load(towers.directory("document"), token_budget=token_budget)


def load_library(towers: "Artifact", token_budget: int) -> "OneView":
    """Load an artifact's document tower, run by sentence-transformers."""
    from scalingnote.encode.encoder import Encoder
    from scalingnote.models import published_model
    from scalingnote.models.published_tower import LibraryTower
    from scalingnote.models.weights import compute_dtype, default_device

    folder, facts = towers.directory("document"), towers.read_json(_TOWER)
    tower = LibraryTower(
        published_model.read(folder, "document"),
        role="document",
        max_length=facts["max_length"],
        dtype=compute_dtype("auto", default_device()),
    )
    return OneView(Encoder(tower, token_budget=token_budget), facts)


def load_vllm(towers: "Artifact", token_budget: int, *, gpus: int) -> "OneView":
    """Load an artifact's document tower, run by vLLM on `gpus` GPUs; vLLM makes batches by its own budget."""
    from scalingnote.models import published_model

    folder = towers.directory("document")
    return OneView(VllmEngine(published_model.read(folder, "document"), gpus=gpus), towers.read_json(_TOWER))


class OneView:
    """An engine that pools one position of a row: rows are cut after the position of the indexed view."""

    def __init__(self, engine: EncoderEngine, facts: dict[str, Any]) -> None:
        """Wrap an engine; `facts` are the tower.json of the tower that it runs."""
        self.dim, self.views, self.peak = engine.dim, (indexed_view(facts["views"]),), engine.peak
        self._engine = engine
        # In a causal prompt, tokens after the view have no effect on it; other prompts are read to the end.
        self._at = facts["views"].index(self.views[0]) if facts.get("causal") and "special" in facts else None

    def encode_with_cost(self, rows: Sequence[TokenRow], *, top_k: int = 256) -> RowEncoding:
        """Encode token rows, without terms, and measure the cost."""
        if self._at is not None:
            rows = [replace(row, ids=row.ids[: row.positions[self._at] + 1]) for row in rows]
        return self._engine.encode_with_cost(rows, top_k=top_k)


class VllmEngine:
    """A transformer in vLLM, which computes and pools its states, and the dense layers of its folder."""

    views: tuple[str, ...] = ("summary",)

    def __init__(self, model: "PublishedModel", *, gpus: int) -> None:
        """Start vLLM's engine in this process.

        Args:
            model: settings of the published or saved model.
            gpus: number of GPUs that vLLM splits the weights over (tensor parallelism).
        """
        import torch
        import vllm

        from scalingnote.models import backbone as backbones
        from scalingnote.models.flops import model_shape
        from scalingnote.models.heads import read_head
        from scalingnote.models.weights import compute_dtype

        shell = backbones.shell(model.folder)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = compute_dtype("auto", self._device)
        self._shape, self._gpus = model_shape(shell.model), gpus
        self._head = read_head(model.steps, hidden=shell.hidden, keep=model.truncate_dim)
        self.dim = self._head.dim
        with _transformer_alone(model.folder) as folder:
            self._llm = vllm.LLM(
                model=folder,
                runner="pooling",
                convert="embed",
                dtype=str(self._dtype).removeprefix("torch."),
                skip_tokenizer_init=True,
                tensor_parallel_size=gpus,
                # Ray placed this process; vLLM's workers are its child processes, not further actors.
                distributed_executor_backend="mp" if gpus > 1 else None,
                pooler_config=vllm.config.PoolerConfig(
                    pooling_type=VLLM_POOLING[model.pooling], use_activation=False
                ),
            )

    def encode_with_cost(self, rows: Sequence[TokenRow], *, top_k: int = 256) -> RowEncoding:
        """Encode token rows, without terms, and measure the cost."""
        import torch

        from scalingnote.models import flops

        prompts = [{"prompt_token_ids": row.ids} for row in rows]
        pooled = [result.outputs.embedding for result in self._llm.embed(prompts, use_tqdm=False)]
        with torch.inference_mode():
            embeddings = self._head(torch.tensor(pooled).reshape(len(rows), self._head.hidden)).numpy()
        lengths = [len(row.ids) for row in rows]
        cost = Cost(sum(lengths), sum(lengths), flops.of_rows(self._shape, lengths))
        return RowEncoding(embeddings[:, np.newaxis], None, cost)

    def peak(self) -> float:
        """Measure FLOPs per second of large matrix products, multiplied by the number of GPUs."""
        from scalingnote.models.weights import matmul_peak

        return matmul_peak(self._device, self._dtype) * self._gpus


def _transformer_alone(folder: Path) -> "TemporaryDirectory[str]":
    """Link a model's files without modules.json: vLLM would read some of the dense layers, but not all."""
    links = TemporaryDirectory(prefix="scalingnote-vllm-")
    for file in folder.iterdir():
        if file.is_file() and file.name != "modules.json":
            Path(links.name, file.name).symlink_to(file.resolve())
    return links
