"""The dual encoder: a query tower of any kind and a document tower with one embedding space.

A saved dual encoder has the folders ``query``, ``document``, and ``sparse_query`` if documents have terms.
"""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import backbone as backbones
from scalingnote.models import lookup, published_tower, token_wise, tower
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch
from scalingnote.models.config import LookupConfig, Scratch, TokenWiseConfig, TowerConfig
from scalingnote.models.frozen import store_base
from scalingnote.models.lookup import LookupTower
from scalingnote.models.published_model import Role
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import Tower
from scalingnote.models.weights import share_weights

QueryConfig = TowerConfig | LookupConfig | TokenWiseConfig


class DualEncoder(nn.Module):
    """A query tower and a document tower. One module, so that data-parallel wrappers see one forward pass."""

    def __init__(
        self,
        query: Tower | LookupTower | TokenWise,
        document: Tower,
        sparse_query: SparseQuery | None = None,
    ) -> None:
        super().__init__()
        self.query, self.document, self.sparse_query = query, document, sparse_query

    def forward(
        self, queries: Batch, documents: Batch
    ) -> tuple[Float[Tensor, "queries dim"], Float[Tensor, "docs views dim"]]:
        """Return query embeddings and document embeddings per view, not normalised."""
        return self.encode("query", queries)[:, 0], self.encode("document", documents)

    def encode(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """Return float32 embeddings of rows by the tower `name`, not normalised. Queries have one view."""
        tower: nn.Module = {"query": self.query, "document": self.document}[name]
        return tower(rows)  # type: ignore[no-any-return]

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write both towers below `folder`; a token_wise query tower is saved as a lookup table."""
        self.query.save(folder / "query", merge_adapters=merge_adapters)
        self.document.save(folder / "document", merge_adapters=merge_adapters)
        if self.sparse_query is not None:
            self.sparse_query.save(folder / "sparse_query")

    @classmethod
    def load(cls, folder: Path) -> "DualEncoder":
        """Read a folder written by :meth:`save`; ArtifactError if it holds no dual encoder."""
        document = load_tower(folder / "document")
        sparse = SparseQuery.load(folder / "sparse_query") if document.sparse else None
        return cls(load_query_tower(folder / "query"), document, sparse)


def build(
    query: QueryConfig,
    document: TowerConfig,
    *,
    dim: int,
    tokenizers: dict[str, str],
    seed: int,
    share_base: bool,
    share_backbone: bool = False,
    sparse: bool = False,
    document_seed: int | None = None,
) -> DualEncoder:
    """Build both towers, ready to train.

    Args:
        query: the query tower.
        document: the document tower.
        dim: width of the embeddings.
        tokenizers: tokenizer JSON by "query" and "document", of the towers that start from scratch.
        seed: of new weights.
        share_base: whether two towers with adapters on equal backbones hold the frozen weights once.
        share_backbone: whether a token_wise query tower uses the document tower's backbone with its adapter.
        sparse: whether the document tower gets a sparse head.
        document_seed: of a document tower that starts from scratch; None: `seed`. With equal weights in both
            towers, equal tokens of query and document match, which finds documents before any training.

    Raises:
        ConfigError: the configs do not fit together, or a model cannot be loaded.
    """
    query_json, document_json = tokenizers.get("query"), tokenizers.get("document")
    query_tower = partial(build_query_tower, query, dim=dim, seed=seed)
    # A pretrained tower draws its projection alone, which both must share to stay comparable.
    from_scratch = isinstance(document.backbone, Scratch)
    of_document = document_seed if from_scratch and document_seed is not None else seed
    document_tower = partial(build_tower, document, role="document", dim=dim, seed=of_document, sparse=sparse)
    if share_backbone:
        assert query_json == document_json
        assert isinstance(query, TokenWiseConfig)
        if document.attention == "flash_attention_2":
            raise ConfigError(
                "flash_attention_2 takes no mask of blocks: leave document.attention at auto, or give the "
                "token_wise query tower a backbone of its own"
            )
        built = document_tower(tokenizer_json=document_json)
        # Each tower changes the padding and truncation of its tokenizer: both need their own.
        shared = Backbone(built.backbone, copy.deepcopy(built.tokenizer), built.causal)
        return DualEncoder(query_tower(tokenizer_json=None, backbone=shared, adapter="document"), built)
    if not (share_base and query_json == document_json and shares_base(query, document)):
        return DualEncoder(
            query_tower(tokenizer_json=query_json), document_tower(tokenizer_json=document_json)
        )
    if document.pooling == "placeholders":
        first = backbones.build(document.backbone, tokenizer_json=document_json, seed=seed)
    else:
        first = published_tower.backbone_of(document, "document")
    assert document.lora is not None
    store_base(first.model, document.lora.base)
    second = Backbone(share_weights(first.model), copy.deepcopy(first.tokenizer), first.causal)
    return DualEncoder(
        query_tower(tokenizer_json=None, backbone=first),
        document_tower(tokenizer_json=None, backbone=second),
    )


def shares_base(query: QueryConfig, document: TowerConfig) -> bool:
    """Return whether two towers can share a frozen backbone: equal and equally stored, both with adapters."""
    if isinstance(query, LookupConfig):
        return False
    poolings = [
        tower.pooling if isinstance(tower, TowerConfig) else "placeholders" for tower in (query, document)
    ]
    if poolings.count("placeholders") == 1:  # its table has rows for placeholders, the other's has none
        return False
    if query.lora is None or document.lora is None or query.lora.base != document.lora.base:
        return False
    return query.backbone == document.backbone


def build_query_tower(
    config: TowerConfig | LookupConfig | TokenWiseConfig,
    *,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None = None,
    adapter: str | None = None,
) -> Tower | LookupTower | TokenWise:
    """Build a query tower of any kind, ready to train.

    Args:
        config: its class determines the kind of tower.
        dim: width of the embeddings.
        tokenizer_json: tokenizer of a tower from scratch.
        seed: of new weights.
        backbone: used instead of the config's; a lookup tower has none.
        adapter: name of the adapter that `backbone` already has.

    Raises:
        ConfigError: something that the kind of tower needs is missing.
    """
    if isinstance(config, LookupConfig):
        return lookup.build(config, dim=dim, tokenizer_json=tokenizer_json, seed=seed)
    parts: dict[str, Any] = {"tokenizer_json": tokenizer_json, "backbone": backbone, "adapter": adapter}
    if isinstance(config, TokenWiseConfig):
        return token_wise.build(config, dim=dim, seed=seed, **parts)
    return build_tower(config, role="query", dim=dim, seed=seed, **parts)


def build_tower(
    config: TowerConfig,
    *,
    role: Role,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None = None,
    sparse: bool = False,
    adapter: str | None = None,
) -> Tower:
    """Build a transformer tower of any kind that is ready to train.

    Args:
        config: the tower. Two towers of one config and seed start from the same backbone weights.
        role: which texts the tower reads.
        dim: width of the embeddings.
        tokenizer_json: tokenizer of a backbone from scratch.
        seed: of new weights.
        backbone: used instead of the config's.
        sparse: whether the tower gets a sparse head: the checkpoint's own language-model head, with the
            transform of a masked language model, or the rows of the input table.
        adapter: name of the adapter that `backbone` already has.

    Raises:
        ConfigError: the parts do not fit together, or a model cannot be loaded.
    """
    if config.pooling != "placeholders":
        if sparse:
            raise ConfigError("term weights need a document prompt: set document.pooling to placeholders")
        return published_tower.build(
            config, role=role, dim=dim, seed=seed, backbone=backbone, adapter=adapter
        )
    parts: dict[str, Any] = {"tokenizer_json": tokenizer_json, "backbone": backbone, "adapter": adapter}
    if config.reads == "tokens":
        if role == "query" or sparse:
            raise ConfigError(
                "reads=tokens is of documents without term weights: set query.kind to token_wise, and leave "
                "train.sparse out"
            )
        return token_wise.build_documents(config, dim=dim, seed=seed, **parts)
    return tower.build(config, role=role, dim=dim, seed=seed, sparse=sparse, **parts)


def load_query_tower(folder: Path) -> Tower | LookupTower:
    """Read a saved query tower of any kind; ArtifactError if the folder holds none."""
    return LookupTower.load(folder) if _facts(folder).get("kind") == "lookup" else load_tower(folder)


def load_tower(folder: Path, role: Role | None = None) -> Tower:
    """Read a saved transformer tower of any kind.

    Args:
        folder: of a tower that we saved, or, with `role`, of a model that sentence-transformers reads.
        role: which texts the tower of such a model reads.

    Raises:
        ArtifactError: the folder holds no tower.
        ConfigError: as :func:`scalingnote.models.published_tower.open_published`.
    """
    if role and not (folder / "tower.json").exists():
        return published_tower.open_published(folder, role)
    facts = _facts(folder)
    try:
        match facts.get("kind"):
            case "native":
                return published_tower.load(folder, facts)
            case "sentence_transformers":
                return published_tower.LibraryTower.load(folder)
            case token_wise.TOKEN_DOCUMENTS:
                return token_wise.load_documents(folder, facts)
            case _:
                return tower.load(folder, facts)
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder} is not a tower: {error.filename or error} is missing") from None


def _facts(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "tower.json").read_text())  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder} is not a tower: {error.filename} is missing") from None
