"""The parts of an application, as a gateway calls them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scalingnote.models.published_model import Similarity
from scalingnote.serve.concurrency import Handle, VersionHandle, for_reading
from scalingnote.serve.versions import Catalog, LiveCatalog


@dataclass(frozen=True)
class ServedArm:
    """A way to answer queries, which a request may name."""

    name: str
    encoder: Any  # a Handle; in the arguments of a gateway that encodes queries itself, QueryPathParts
    tower: str  # its form, for /info
    personalised: bool
    version: str | None = None  # name of the index version; None: the active one
    follows: bool = False  # encodes by the towers of whichever version is active, not by one of its own


@dataclass(frozen=True)
class Deployed:
    """Handles of the parts of an application.

    Attributes:
        arms: the first one answers requests outside the traffic split.
        catalog: of the index versions; None: a model that is served without an index.
        searchers: one for each group of shards; none, in the arguments of a gateway: it searches itself.
        aggregators: of the groups of :func:`scalingnote.serve.fan_out.sizes`; none: the gateway calls the
            searchers itself.
        documents: the document tower, for clients of embeddings; None: it is not served.
        reranker: None: requests for re-ranking are refused.
        teacher: encodes the queries that `serve.escalation` chooses; None: no query.
        document_encoder, writer: of a live index; None: writes are refused.
        name: of the model, for clients of embeddings.
        similarity: that embeddings are compared by.
    """

    arms: Sequence[ServedArm]
    catalog: Catalog | LiveCatalog | None = None
    searchers: Sequence[Handle] = ()
    aggregators: Sequence[Handle] = ()
    documents: Handle | None = None
    reranker: Handle | None = None
    teacher: Handle | None = None
    document_encoder: Handle | None = None
    writer: Handle | None = None
    name: str = "scalingnote"
    similarity: Similarity = "cosine"

    def read_again(self) -> "Deployed":
        """The same parts; what reads is asked once more where a replica died, the writer never is."""

        def optional(handle: Handle | None) -> Handle | None:
            return None if handle is None else for_reading(handle)

        return replace(
            self,
            arms=[replace(arm, encoder=for_reading(arm.encoder)) for arm in self.arms],
            searchers=[for_reading(each) for each in self.searchers],
            aggregators=[for_reading(each) for each in self.aggregators],
            documents=optional(self.documents),
            reranker=optional(self.reranker),
            teacher=optional(self.teacher),
            document_encoder=optional(self.document_encoder),
        )

    def by_version(self) -> "Deployed":
        """The same parts; those that hold the towers of every version are called for one of them."""
        follows = self.catalog is not None and self.catalog.towers is not None
        arms = [replace(arm, encoder=VersionHandle(arm.encoder)) if arm.follows else arm for arm in self.arms]
        if not follows:
            return replace(self, arms=arms)
        documents = None if self.documents is None else VersionHandle(self.documents)
        teacher = None if self.teacher is None else VersionHandle(self.teacher)
        return replace(self, arms=arms, documents=documents, teacher=teacher)

    def towers(self) -> dict[str, Handle]:
        """The parts that hold the towers of every version, by the names that ``/healthz`` gives them."""
        parts = {f"encoder:{arm.name}": arm.encoder for arm in self.arms}
        parts |= {"teacher": self.teacher, "document_tower": self.documents}
        return {name: part for name, part in parts.items() if isinstance(part, VersionHandle)}
