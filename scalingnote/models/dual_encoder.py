"""The dual encoder: a query tower and a document tower that meet in one embedding space."""

from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn

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
        return self.query(queries)[:, 0], self.document(documents)

    def save(self, folder: Path) -> None:
        """Write both towers below `folder`."""
        self.query.save(folder / "query")
        self.document.save(folder / "document")

    @classmethod
    def load(cls, folder: Path) -> "DualEncoder":
        """Read both towers."""
        return cls(Tower.load(folder / "query"), Tower.load(folder / "document"))
