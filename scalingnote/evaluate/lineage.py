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
    "cross_encoder": "cross_encoder",
    "query_embeddings": "teacher",
    "student": "distill",
    "embeddings": "encode",
    "semantic_ids": "quantize",
    "index": "index",
    "report": "evaluate",
}
# What a stage calls an artifact that it reads beside another one of the same kind.
KIND_OF = {"teacher_embeddings": "embeddings", "codebooks": "semantic_ids"}


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage. Without `artifact` it is gone, or was replaced by another since."""

    kind: str
    uri: str
    digest: str
    artifact: Artifact | None

    @property
    def stage(self) -> str:
        """The stage that builds artifacts of this kind.

        A dual encoder that names the weights of a published model was adopted.
        Triplets that rest on towers were mined with them; embeddings that rest on semantic IDs are fused, and
        others that rest on a student are its own.
        """
        parents = self.artifact.manifest.parents if self.artifact else {}
        if self.kind == "dual_encoder" and self.artifact and "weights_sha256" in self.artifact.manifest.info:
            return "adopt"
        if self.kind == "triplets" and "dual_encoder" in parents:
            return "mine"
        if self.kind == "embeddings" and "semantic_ids" in parents:
            return "fuse"
        if self.kind == "embeddings" and "student" in parents:
            return "encode_student"
        return STAGE_OF.get(self.kind, self.kind)

    @property
    def seconds(self) -> float | None:
        """How long its stage took, all attempts but the last left out."""
        return self.artifact.manifest.info.get("seconds") if self.artifact else None


def lineage(artifacts: Iterable[Artifact]) -> list[Ancestor]:
    """`artifacts` and all they rest on, each once, none before what it rests on."""
    found: dict[str, Ancestor] = {}
    for ancestor in _in_order(Ancestor(a.manifest.kind, a.uri, a.digest, a) for a in artifacts):
        _add(ancestor, found)
    return list(found.values())


def _add(ancestor: Ancestor, found: dict[str, Ancestor]) -> None:
    if ancestor.digest in found:
        return
    parents = ancestor.artifact.manifest.parents if ancestor.artifact else {}
    new = {name: parent for name, parent in parents.items() if parent["digest"] not in found}
    opened = (_open(KIND_OF.get(name, name), parent["uri"], parent["digest"]) for name, parent in new.items())
    for parent in _in_order(opened):
        _add(parent, found)
    found[ancestor.digest] = ancestor


def _in_order(ancestors: Iterable[Ancestor]) -> list[Ancestor]:
    """In the order of the stages that build their kinds."""
    order = {kind: i for i, kind in enumerate(STAGE_OF)}
    return sorted(ancestors, key=lambda a: (order.get(a.kind, len(order)), a.kind, a.digest))


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
