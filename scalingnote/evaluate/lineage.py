"""Lineage: all artifacts behind an artifact, found by following the parents in manifests."""

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
# Names of parents that differ from their kind, because a stage reads two artifacts of that kind.
KIND_OF = {"teacher_embeddings": "embeddings", "codebooks": "semantic_ids"}


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage; `artifact` is None if it was deleted or replaced since."""

    kind: str
    uri: str
    digest: str
    artifact: Artifact | None

    @property
    def stage(self) -> str:
        """The stage that built the artifact, by its kind and its parents."""
        parents = self.artifact.manifest.parents if self.artifact else {}
        # Adopted dual encoders record the checksum of the published weights.
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
        """Time of the last attempt of its stage."""
        return self.artifact.manifest.info.get("seconds") if self.artifact else None


def lineage(artifacts: Iterable[Artifact]) -> list[Ancestor]:
    """The artifacts and all their ancestors in topological order: parents come first."""
    ancestors: dict[str, Ancestor] = {}
    for ancestor in _in_order(Ancestor(a.manifest.kind, a.uri, a.digest, a) for a in artifacts):
        _add(ancestor, ancestors)
    return list(ancestors.values())


def _add(ancestor: Ancestor, known: dict[str, Ancestor]) -> None:
    if ancestor.digest in known:
        return
    parents = ancestor.artifact.manifest.parents if ancestor.artifact else {}
    new = {name: parent for name, parent in parents.items() if parent["digest"] not in known}
    opened = (_open(KIND_OF.get(name, name), parent["uri"], parent["digest"]) for name, parent in new.items())
    for parent in _in_order(opened):
        _add(parent, known)
    known[ancestor.digest] = ancestor


def _in_order(ancestors: Iterable[Ancestor]) -> list[Ancestor]:
    """Sorted by the order of the stages."""
    order = {kind: i for i, kind in enumerate(STAGE_OF)}
    return sorted(ancestors, key=lambda a: (order.get(a.kind, len(order)), a.kind, a.digest))


def seconds(ancestors: Iterable[Ancestor]) -> dict[str, float]:
    """Stage -> seconds over all its rounds, of the artifacts that still exist."""
    by_stage: dict[str, float] = {}
    for ancestor in ancestors:
        if ancestor.seconds is not None:
            by_stage[ancestor.stage] = round(by_stage.get(ancestor.stage, 0.0) + ancestor.seconds, 3)
    return by_stage


def usage(ancestors: Iterable[Ancestor]) -> dict[str, dict[str, int]]:
    """Stage -> what it took of storage and memory: sums over its rounds, and the largest of their peaks."""
    by_stage: dict[str, dict[str, int]] = {}
    for ancestor in ancestors:
        used = ancestor.artifact.manifest.info.get("usage", {}) if ancestor.artifact else {}
        total = by_stage.setdefault(ancestor.stage, {}) if used else {}
        for name, value in used.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name.endswith("peak_bytes") else before + value
    return by_stage


def _open(kind: str, uri: str, digest: str) -> Ancestor:
    try:
        artifact = open_artifact(uri, kind=kind)
    except ArtifactError:
        return Ancestor(kind, uri, digest, None)
    return Ancestor(kind, uri, digest, artifact if artifact.digest == digest else None)
