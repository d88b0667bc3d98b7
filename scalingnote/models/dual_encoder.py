"""The dual encoder: a query tower and a document tower that meet in one embedding space."""

import copy
from functools import partial
from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn

from scalingnote.models import backbone as backbones
from scalingnote.models import tower
from scalingnote.models.backbone import Backbone
from scalingnote.models.config import TowerConfig
from scalingnote.models.tower import Batch, Tower


class DualEncoder(nn.Module):
    """Two towers, encoded together so that data-parallel wrappers see one forward pass."""

    def __init__(self, query: Tower, document: Tower) -> None:
        super().__init__()
        self.query, self.document = query, document

    def forward(
        self, queries: Batch, documents: Batch
    ) -> tuple[Float[Tensor, "queries dim"], Float[Tensor, "docs views dim"]]:
        """Query embeddings and document embeddings per view, not normalised."""
        return self.encode("query", queries)[:, 0], self.encode("document", documents)

    def encode(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """Embeddings of some rows of the tower `name` (query: one view), float32, not normalised."""
        chosen: Tower = {"query": self.query, "document": self.document}[name]
        return chosen(rows)  # type: ignore[no-any-return]

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write both towers below `folder`."""
        self.query.save(folder / "query", merge_adapters=merge_adapters)
        self.document.save(folder / "document", merge_adapters=merge_adapters)

    @classmethod
    def load(cls, folder: Path) -> "DualEncoder":
        """Read both towers."""
        return cls(Tower.load(folder / "query"), Tower.load(folder / "document"))


def build(
    query: TowerConfig,
    document: TowerConfig,
    *,
    dim: int,
    tokenizers: dict[str, str],
    seed: int,
    share_base: bool,
) -> DualEncoder:
    """Both towers, ready to train; `tokenizers` holds tokenizer JSON of those that start from scratch.

    With `share_base`, two towers with adapters on equal backbones hold its frozen weights once.
    """
    learnt = {name: tokenizers.get(name) for name in ("query", "document")}
    build = partial(tower.build, dim=dim, seed=seed)
    if not (share_base and shares_base(query, document) and learnt["query"] == learnt["document"]):
        return DualEncoder(
            build(query, role="query", tokenizer_json=learnt["query"]),
            build(document, role="document", tokenizer_json=learnt["document"]),
        )
    from scalingnote.models import adapters  # late: peft is slow to import, and few need it

    first = backbones.build(query.backbone, tokenizer_json=learnt["query"], seed=seed)
    second = Backbone(adapters.twin(first.model), copy.deepcopy(first.tokenizer), first.causal)
    return DualEncoder(
        build(query, role="query", tokenizer_json=None, backbone=first),
        build(document, role="document", tokenizer_json=None, backbone=second),
    )


def shares_base(query: TowerConfig, document: TowerConfig) -> bool:
    """Whether two towers could stand on one frozen backbone: the same one, and both with an adapter."""
    return query.backbone == document.backbone and None not in (query.lora, document.lora)
