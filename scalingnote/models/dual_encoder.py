"""The dual encoder: a query tower of any kind and a document tower that meet in one embedding space.

Saved, it is a folder of folders: ``query``, ``document``, and ``sparse_query`` where documents have terms.
"""

import copy
from functools import partial
from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.models import backbone as backbones
from scalingnote.models import native_tower, query_tower, tower
from scalingnote.models.backbone import Backbone
from scalingnote.models.config import LookupConfig, TokenWiseConfig, TowerConfig
from scalingnote.models.lookup import LookupTower
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import Batch, Tower

QueryConfig = TowerConfig | LookupConfig | TokenWiseConfig


class DualEncoder(nn.Module):
    """Two towers, encoded together so that data-parallel wrappers see one forward pass."""

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
        """Query embeddings and document embeddings per view, not normalised."""
        return self.encode("query", queries)[:, 0], self.encode("document", documents)

    def encode(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """Embeddings of some rows of the tower `name` (query: one view), float32, not normalised."""
        chosen: nn.Module = {"query": self.query, "document": self.document}[name]
        return chosen(rows)  # type: ignore[no-any-return]

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write both towers below `folder`; a token_wise query tower becomes a table there."""
        self.query.save(folder / "query", merge_adapters=merge_adapters)
        self.document.save(folder / "document", merge_adapters=merge_adapters)
        if self.sparse_query is not None:
            self.sparse_query.save(folder / "sparse_query")

    @classmethod
    def load(cls, folder: Path) -> "DualEncoder":
        """Read both towers."""
        document = Tower.load(folder / "document")
        sparse = SparseQuery.load(folder / "sparse_query") if document.sparse else None
        return cls(query_tower.load(folder / "query"), document, sparse)


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
) -> DualEncoder:
    """Both towers, ready to train; `tokenizers` holds tokenizer JSON of those that start from scratch.

    With `share_base`, two towers with adapters on equal backbones hold its frozen weights once; with
    `share_backbone` a token_wise query tower reads by the document tower's, adapter included. `sparse` gives
    the document tower a sparse head.
    """
    learnt = {name: tokenizers.get(name) for name in ("query", "document")}
    of_query = partial(query_tower.build, query, dim=dim, seed=seed)
    of_document = partial(tower.build, document, role="document", dim=dim, seed=seed, sparse=sparse)
    same = learnt["query"] == learnt["document"]
    if share_backbone:
        assert same
        assert isinstance(query, TokenWiseConfig)
        if document.attention == "flash_attention_2":
            raise ConfigError(
                "flash_attention_2 takes no mask of blocks: leave document.attention at auto, or give the "
                "token_wise query tower a backbone of its own"
            )
        whole = of_document(tokenizer_json=learnt["document"])
        shared = Backbone(whole.backbone, copy.deepcopy(whole.tokenizer), whole.causal)
        return DualEncoder(of_query(tokenizer_json=None, backbone=shared, adapter="document"), whole)
    if not (share_base and same and shares_base(query, document)):
        return DualEncoder(
            of_query(tokenizer_json=learnt["query"]), of_document(tokenizer_json=learnt["document"])
        )
    from scalingnote.models import adapters  # late: peft is slow to import, and few need it

    if document.pooling == "placeholders":
        first = backbones.build(document.backbone, tokenizer_json=learnt["document"], seed=seed)
    else:
        first = native_tower.backbone_of(document, "document")
    second = Backbone(adapters.twin(first.model), copy.deepcopy(first.tokenizer), first.causal)
    return DualEncoder(
        of_query(tokenizer_json=None, backbone=first), of_document(tokenizer_json=None, backbone=second)
    )


def shares_base(query: QueryConfig, document: TowerConfig) -> bool:
    """Whether two towers could stand on one frozen backbone: the same one, and both with an adapter."""
    if isinstance(query, LookupConfig):
        return False
    poolings = [
        tower.pooling if isinstance(tower, TowerConfig) else "placeholders" for tower in (query, document)
    ]
    if poolings.count("placeholders") == 1:  # for these its table has rows that the other's has not
        return False
    return query.backbone == document.backbone and None not in (query.lora, document.lora)
