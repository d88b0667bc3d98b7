"""Handles of the parts of an application, which a gateway calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scalingnote.models.published_model import Similarity
from scalingnote.serve.catalog import Catalog
from scalingnote.serve.concurrency import Handle, VersionHandle, for_reading
from scalingnote.serve.live_catalog import LiveCatalog


@dataclass(frozen=True)
class ServedArm:
    """A query tower and an index that answer queries. A request may name it."""

    name: str
    encoder: Any  # a Handle; in the arguments of a gateway that encodes queries itself, QueryPathParts
    tower: str  # its form, for /info
    personalised: bool
    version: str | None = None  # name of the index version; None: the active one
    follows: bool = False  # whether the towers of the active version encode, not a tower of the arm itself


@dataclass(frozen=True)
class Deployed:
    """Handles of the parts of an application.

    Attributes:
        arms: the first one answers requests outside the traffic split.
        catalog: of the index versions; None: a model is served without an index.
        searchers: one for each group of shards; if the arguments of a gateway have none, it searches itself.
        aggregators: of the groups of :func:`scalingnote.serve.fan_out.sizes`; if there are none, the gateway
            calls the searchers itself.
        documents: the document tower, for clients of embeddings; None: it is not served.
        reranker: the cross-encoder; None: requests for re-ranking are refused.
        teacher: encodes the queries that `serve.escalation` chooses; None: there is no teacher.
        document_encoder, writer: of a live index; None: writes are refused.
        name: of the model, for clients of embeddings.
        similarity: how embeddings are compared.
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

    def for_gateway(self) -> "Deployed":
        """Return the parts with handles for a gateway.

        A call that reads is made once more if a replica died; a call of the writer never is. Parts that hold
        the towers of every version get a handle that calls the towers of one version.
        """
        of_versions = self.catalog is not None

        def read(handle: Handle | None, *, of_versions: bool = False) -> Any:
            if handle is None:
                return None
            return VersionHandle(for_reading(handle)) if of_versions else for_reading(handle)

        return replace(
            self,
            arms=[replace(arm, encoder=read(arm.encoder, of_versions=arm.follows)) for arm in self.arms],
            searchers=[for_reading(each) for each in self.searchers],
            aggregators=[for_reading(each) for each in self.aggregators],
            documents=read(self.documents, of_versions=of_versions),
            reranker=read(self.reranker),
            teacher=read(self.teacher, of_versions=of_versions),
            document_encoder=read(self.document_encoder),
        )

    def towers(self) -> dict[str, Handle]:
        """Return the parts that hold the towers of every version, by their names in ``/healthz``."""
        parts = {f"encoder:{arm.name}": arm.encoder for arm in self.arms}
        parts |= {"teacher": self.teacher, "document_tower": self.documents}
        return {name: part for name, part in parts.items() if isinstance(part, VersionHandle)}
