"""The dual encoder: a query tower of any kind and a document tower with one embedding space.

A saved dual encoder has the folders ``query``, ``document``, and ``sparse_query`` if documents have terms.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.model_files import read_json
from scalingnote.models import backbone as backbones
from scalingnote.models import lookup, published_model, published_tower
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch
from scalingnote.models.config import LookupConfig, Pretrained, Scratch, TokenWiseConfig, TowerConfig
from scalingnote.models.heads import Projection
from scalingnote.models.lookup import LookupTower
from scalingnote.models.prompt import PLACEHOLDERS
from scalingnote.models.published_model import Role
from scalingnote.models.published_tower import LibraryTower, PublishedTower
from scalingnote.models.sparse_head import SparseHead
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.models.token_wise import TokenDocumentTower, TokenWise
from scalingnote.models.tower import Tower, tower_prompt
from scalingnote.models.weights import add_adapter, share_weights, store_base

log = get_logger("models")

QueryConfig = TowerConfig | LookupConfig | TokenWiseConfig


class DualEncoder(nn.Module):
    """A query tower and a document tower in one module, because data-parallel wrappers need one forward."""

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
        """Return float32 embeddings of rows by the tower `name`, not normalised; queries have one view."""
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
        """Read a folder written by :meth:`save`; raise ArtifactError if it holds no dual encoder."""
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
    share_backbone: bool = False,
    sparse: bool = False,
    document_seed: int | None = None,
) -> DualEncoder:
    """Build the towers of two configs, ready to train.

    Args:
        query: config of the query tower.
        document: config of the document tower.
        dim: width of the embeddings.
        tokenizers: tokenizer JSON by "query" and "document", for the towers that start from scratch.
        seed: seed of new weights.
        share_backbone: whether a token_wise query tower uses the document tower's backbone with its adapter.
        sparse: whether the document tower gets a sparse head.
        document_seed: seed of a document tower that starts from scratch; None: `seed`. With equal weights in
            both towers, equal tokens of query and document match, which finds documents before any training.

    Raises:
        ConfigError: the configs do not fit together, or a model cannot be loaded.
    """
    if share_backbone and document.attention == "flash_attention_2":
        raise ConfigError(
            "flash_attention_2 takes no mask of blocks: leave document.attention at auto, or configure a "
            "separate backbone for the token_wise query tower"
        )
    query_json, document_json = tokenizers.get("query"), tokenizers.get("document")
    query_backbone = document_backbone = None
    # Two towers with adapters on equal backbones share the frozen weights.
    if not share_backbone and query_json == document_json and _have_one_base(query, document):
        query_backbone, document_backbone = _shared_base(document, tokenizer_json=document_json, seed=seed)
    # A pretrained tower draws only its projection, which must be equal in both towers to be comparable.
    scratch_seed = document_seed if isinstance(document.backbone, Scratch) else None
    document_tower = build_tower(
        document,
        role="document",
        dim=dim,
        tokenizer_json=document_json,
        seed=seed if scratch_seed is None else scratch_seed,
        backbone=document_backbone,
        sparse=sparse,
    )
    query_tower: Tower | LookupTower | TokenWise
    if share_backbone:
        assert isinstance(query, TokenWiseConfig)
        backbone = _with_own_tokenizer(
            document_tower.backbone, document_tower.tokenizer, document_tower.causal
        )
        query_tower = _token_wise(backbone, query, dim=dim, seed=seed)
    else:
        query_tower = build_query_tower(
            query, dim=dim, tokenizer_json=query_json, seed=seed, backbone=query_backbone
        )
    for side in (query_tower, document_tower):
        if isinstance(side, PublishedTower):
            _compare_by_cosine(side)
    return DualEncoder(query_tower, document_tower)


def _compare_by_cosine(tower: PublishedTower) -> None:
    """Set the similarity of a published model that will be trained to cosine, which the losses use."""
    model = tower.native
    if model.similarity != "cosine" and not model.unit:
        facts = model.source, model.similarity
        log.warning("%s compares embeddings by %s: stage I trains them for comparison by cosine", *facts)
    tower.native = replace(model, similarity="cosine")


def _have_one_base(query: QueryConfig, document: TowerConfig) -> bool:
    """Return whether two towers can share a frozen backbone: equal, equally stored, both with adapters."""
    if isinstance(query, LookupConfig) or query.lora is None or document.lora is None:
        return False
    # The table of a tower with placeholders has rows for them, that of a published model does not.
    has_placeholders = isinstance(query, TokenWiseConfig) or query.pooling == "placeholders"
    return (
        has_placeholders == (document.pooling == "placeholders")
        and query.lora.base == document.lora.base
        and query.backbone == document.backbone
    )


def _shared_base(config: TowerConfig, *, tokenizer_json: str | None, seed: int) -> tuple[Backbone, Backbone]:
    """Return two backbones of a document tower's config with adapters, over the same frozen weights."""
    if config.pooling == "placeholders":
        base = backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=seed)
    else:
        base = published_tower.backbone_of(config, published_tower.model_of(config, "document"))
    assert config.lora is not None
    store_base(base.model, config.lora.base)
    return base, _with_own_tokenizer(share_weights(base.model), base.tokenizer, base.causal)


def _with_own_tokenizer(model: nn.Module, tokenizer: PreTrainedTokenizerFast, causal: bool) -> Backbone:
    """Return a backbone with a copy of `tokenizer`: each tower changes its padding and truncation."""
    return Backbone(model, copy.deepcopy(tokenizer), causal)


def build_query_tower(
    config: QueryConfig, *, dim: int, tokenizer_json: str | None, seed: int, backbone: Backbone | None = None
) -> Tower | LookupTower | TokenWise:
    """Build a query tower of any kind, ready to train; see :func:`build_tower` for arguments and errors.

    A lookup tower ignores `backbone`; a token_wise tower needs it if its config has no backbone.
    """
    if isinstance(config, LookupConfig):
        return lookup.build(config, dim=dim, tokenizer_json=tokenizer_json, seed=seed)
    if isinstance(config, TowerConfig):
        return build_tower(
            config, role="query", dim=dim, tokenizer_json=tokenizer_json, seed=seed, backbone=backbone
        )
    backbone = _start_backbone(config, "query", tokenizer_json=tokenizer_json, seed=seed, backbone=backbone)
    return _token_wise(backbone, config, dim=dim, seed=seed)


def _token_wise(backbone: Backbone, config: TokenWiseConfig, *, dim: int, seed: int) -> TokenWise:
    tower = TokenWise(backbone, config, dim=dim)
    tower.projection.start(config, seed=seed)
    return tower


def build_tower(
    config: TowerConfig,
    *,
    role: Role,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None = None,
    sparse: bool = False,
) -> Tower:
    """Build a transformer tower of any kind, ready to train.

    Args:
        config: config of the tower. Two towers with equal config and seed start from equal backbone weights.
        role: which texts the tower reads.
        dim: width of the embeddings.
        tokenizer_json: tokenizer of a backbone from scratch.
        seed: seed of new weights.
        backbone: used instead of the config's; without an adapter.
        sparse: whether the tower gets a sparse head: the checkpoint's language-model head, with the
            transform of a masked language model, or the rows of the input table.

    Raises:
        ConfigError: the parts do not fit together, or a model cannot be loaded.
    """
    if config.pooling != "placeholders":
        if sparse:
            raise ConfigError("term weights need a document prompt: set document.pooling to placeholders")
        return published_tower.build(config, role=role, dim=dim, seed=seed, backbone=backbone)
    reads_tokens = config.reads == "tokens"
    if reads_tokens and (role == "query" or sparse):
        raise ConfigError(
            "reads=tokens is for documents without term weights: set query.kind to token_wise, and leave "
            "train.sparse out"
        )
    _warn_of_embedding_model(config, role)
    backbone = _start_backbone(config, role, tokenizer_json=tokenizer_json, seed=seed, backbone=backbone)
    head = _sparse_head(config) if sparse else None
    tower = _assemble(backbone, config, role=role, dim=dim, sparse=head)
    tower.projection.start(config, seed=seed)
    return tower


def _assemble(
    backbone: Backbone, config: TowerConfig, *, role: Role, dim: int, sparse: SparseHead | None
) -> Tower:
    """Return a tower with uninitialised weights of its projection."""
    projection = Projection(backbone.hidden, dim)
    if config.reads == "tokens":
        return TokenDocumentTower(backbone, config, projection)
    prompt = tower_prompt(backbone, config, role=role, spans=sparse is not None)
    return Tower(backbone, config, prompt, projection, role=role, sparse=sparse)


def _start_backbone(
    config: TowerConfig | TokenWiseConfig,
    role: Role,
    *,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None,
) -> Backbone:
    """Return `backbone`, or else the config's, with the adapter of the config."""
    if backbone is None:
        assert config.backbone is not None, "this tower is built on the document tower's backbone"
        backbone = backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=seed)
    if config.lora is not None:
        # Queries contain no placeholders, so the rows of new tokens would get no gradients.
        ids = backbone.raw_tokenizer.get_vocab() if role == "document" else {}
        tokens = [ids[token] for token in PLACEHOLDERS if token in ids]
        add_adapter(backbone.model, config.lora, name=role, tokens=tokens, seed=seed)
    return backbone


def _warn_of_embedding_model(config: TowerConfig, role: Role) -> None:
    """Log a warning if placeholders replace the sentence-transformers settings of the backbone's folder."""
    source = config.backbone
    if "pooling" in config.model_fields_set or not isinstance(source, Pretrained):
        return
    if (Path(source.path) / "modules.json").exists():
        log.warning(
            "%s is an embedding model with its own pooling and prompts, which placeholders replace: set "
            "train.%s.pooling to auto to start from its embeddings, or to placeholders to confirm this",
            source.path,
            role,
        )


def _sparse_head(config: TowerConfig) -> SparseHead:
    source = config.backbone
    head = backbones.output_head(source.path) if isinstance(source, Pretrained) else SparseHead(None)
    return head.requires_grad_(config.lora is None)  # LoRA trains no head


def load_query_tower(folder: Path) -> Tower | LookupTower:
    """Read a saved query tower of any kind; raise ArtifactError if the folder holds none."""
    is_table = (read_json(folder / "tower.json") or {}).get("kind") == "lookup"
    return LookupTower.load(folder) if is_table else load_tower(folder)


def load_tower(folder: Path, role: Role | None = None, *, dtype: torch.dtype = torch.float32) -> Tower:
    """Read a saved transformer tower of any kind, or, with `role`, a model that sentence-transformers reads.

    `dtype` is that of the backbone's weights; layers after the backbone and buffers are float32. Raise
    ArtifactError if the folder holds no tower, and ConfigError like :func:`published_tower.open_published`.
    """
    facts = read_json(folder / "tower.json")
    if facts is None and role:
        config = TowerConfig(backbone=Pretrained(path=str(folder)), pooling="auto")
        return published_tower.open_published(config, role, dtype=dtype)
    if facts is None:
        raise ArtifactError(f"{folder} is not a tower: {folder / 'tower.json'} is missing")
    length = facts["max_length"]
    try:
        match facts.get("kind"):
            case PublishedTower.kind:
                source = Pretrained(path=str(folder), layers=facts.get("layers"))
                config = TowerConfig(backbone=source, pooling="auto", max_length=length)
                return published_tower.build(config, role=facts["role"], dim=None, dtype=dtype).eval()
            case LibraryTower.kind:
                model = published_model.read(folder, facts["role"])
                return LibraryTower(model, role=facts["role"], max_length=length, dtype=dtype).eval()
            case _:
                return _load_own(folder, facts, dtype).eval()
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder} is not a tower: {error.filename or error} is missing") from None


def _load_own(folder: Path, facts: Mapping[str, Any], dtype: torch.dtype) -> Tower:
    """Read a tower of this package with its backbone in `dtype`; `facts` is its tower.json."""
    weight = load_file(folder / "projection.safetensors")["weight"]
    reads: Any = "tokens" if facts.get("kind") == TokenDocumentTower.kind else "text"
    config = TowerConfig(max_length=facts["max_length"], prompt=facts["prompt"], reads=reads)
    backbone = backbones.load(folder, layers=facts.get("layers"), dtype=dtype)
    backbone.causal = facts["causal"]
    sparse = None
    if facts.get("sparse"):
        head = load_file(folder / "sparse_head.safetensors") if facts["sparse"] == "own" else {}
        sparse = SparseHead.restore(head, facts.get("sparse_transform"))
    tower = _assemble(backbone, config, role=facts["role"], dim=facts["dim"], sparse=sparse)
    with torch.no_grad():
        tower.projection.weight.copy_(weight)
    return tower
