"""Lineage: an artifact's manifest names its parents; following them gives every stage it rests on."""

from collections.abc import Iterable
from dataclasses import dataclass

from scalingnote.errors import ArtifactError
from scalingnote.storage.artifact import Artifact, open_artifact

STAGE_OF = {
    "dataset": "prepare",
    "planner": "planner",
    "triplets": "collect",
    "dual_encoder": "train",
    "query_embeddings": "teacher",
    "student": "distill",
    "embeddings": "encode",
    "semantic_ids": "quantize",
    "index": "index",
    "report": "evaluate",
}


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage. Without `artifact` it is gone, or was replaced by another since."""

    kind: str
    uri: str
    digest: str
    artifact: Artifact | None

    @property
    def stage(self) -> str:
        """The stage that builds artifacts of this kind; triplets that rest on towers were mined with them."""
        if self.kind == "triplets" and self.artifact and "dual_encoder" in self.artifact.manifest.parents:
            return "mine"
        return STAGE_OF.get(self.kind, self.kind)

    @property
    def seconds(self) -> float | None:
        """How long its stage took, all attempts but the last left out."""
        return self.artifact.manifest.info.get("seconds") if self.artifact else None


def lineage(artifacts: Iterable[Artifact]) -> list[Ancestor]:
    """`artifacts` and all they rest on, each once, in the order of the stages."""
    found: dict[str, Ancestor] = {}
    waiting = [Ancestor(a.manifest.kind, a.uri, a.digest, a) for a in artifacts]
    while waiting:
        ancestor = waiting.pop()
        if ancestor.digest in found:
            continue
        found[ancestor.digest] = ancestor
        if ancestor.artifact:
            for kind, parent in ancestor.artifact.manifest.parents.items():
                waiting.append(_open(kind, parent["uri"], parent["digest"]))
    order = {kind: i for i, kind in enumerate(STAGE_OF)}
    return sorted(found.values(), key=lambda a: (order.get(a.kind, len(order)), a.kind, a.digest))


def seconds(ancestors: Iterable[Ancestor]) -> dict[str, float]:
    """Stage -> seconds over all its rounds, of the artifacts that are still there."""
    found: dict[str, float] = {}
    for ancestor in ancestors:
        if ancestor.seconds is not None:
            found[ancestor.stage] = round(found.get(ancestor.stage, 0.0) + ancestor.seconds, 3)
    return found


def _open(kind: str, uri: str, digest: str) -> Ancestor:
    try:
        artifact = open_artifact(uri, kind=kind)
    except ArtifactError:
        return Ancestor(kind, uri, digest, None)
    return Ancestor(kind, uri, digest, artifact if artifact.digest == digest else None)
