"""Pairs of an index and the towers that encode for it.

    index artifact ─manifest─► query tower, terms, fusion, teacher, document tower

An index is built for one query tower, and its manifest names it. So a version of the catalog is both, and a
change from one version to another may be a change of the model: gateways load the towers with the shards, see
:mod:`scalingnote.serve.tower_versions`.
"""

from dataclasses import dataclass
from typing import Any

from scalingnote.core.errors import ArtifactError
from scalingnote.index.shard import open_layout
from scalingnote.serve.towers import Location
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, open_artifact


@dataclass(frozen=True)
class PairedTowers:
    """Where the artifacts lie that encode for an index: its queries, and more where there is more."""

    query: Location
    sparse: Location | None = None  # the artifact with ``sparse_query/``
    fusion: Location | None = None  # the artifact with ``query_fusion/``
    planner: Location | None = None
    teacher: Location | None = None  # for the queries that `serve.escalation` chooses
    document: Location | None = None  # for clients of embeddings

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "PairedTowers":
        """The towers that a catalog's file lists."""
        return cls(**{name: place and (place[0], place[1]) for name, place in values.items()})


def towers_of(index: Artifact, active: PairedTowers | None = None) -> PairedTowers | None:
    """The towers that an index was built for, as its manifest names them; None where it names none.

    They lie where they were built, or, where the run's folder was moved, beside the index. Where not all of
    them do, `active` are the ones if the index names their query tower and terms.

    Raises:
        ArtifactError: one of them is missing there, or is another one by now.
    """
    try:
        return _named_towers(index)
    except ArtifactError:
        if active is None or not _is_built_for(index, active):
            raise
        return active


def _named_towers(index: Artifact) -> PairedTowers | None:
    student = _parent(index, "student")
    tower = student or _parent(index, "dual_encoder")
    if tower is None:
        return None
    embeddings = _require(_parent(index, "embeddings"))
    fused = bool(embeddings.names("query_fusion/"))
    # Fusion reads the embeddings that a tower computed, and writes new ones.
    encoded = _require(_parent(embeddings, "embeddings")) if fused else embeddings
    own, dual_encoder = _parent(encoded, "student"), _parent(encoded, "dual_encoder")
    has_terms = open_layout(index).sparse
    escalates = student is not None and own is None and not fused
    return PairedTowers(
        query=location_of(tower),
        sparse=_optional(_parent(index, "bm25_terms") or dual_encoder) if has_terms else None,
        fusion=_optional(embeddings) if fused else None,
        planner=_optional(_parent(embeddings, "planner")) if fused else None,
        teacher=_optional(dual_encoder) if escalates else None,
        document=_optional(own or dual_encoder),
    )


def _is_built_for(index: Artifact, active: PairedTowers) -> bool:
    """Whether an index names the query tower and the terms that are active."""
    named = index.manifest.parents
    asked = {named[kind]["digest"] for kind in ("student", "dual_encoder", "bm25_terms") if kind in named}
    known = set[str]()
    for location in filter(None, (active.query, active.sparse)):
        found = open_artifact(location[0], kind=location[1])
        # A tower that was exported names the one that it was exported from.
        known |= {found.digest, *(parent["digest"] for parent in found.manifest.parents.values())}
    return asked <= known


def _parent(artifact: Artifact, kind: str) -> Artifact | None:
    """The artifact of this kind that another one was made of; None if there was none."""
    named = artifact.manifest.parents.get(kind)
    if named is None:
        return None
    beside = fs.join(run_of(artifact.uri), *named["uri"].rsplit("/", 2)[-2:])
    for uri in dict.fromkeys((named["uri"], beside)):
        if fs.exists(fs.join(uri, MANIFEST)):
            found = open_artifact(uri, kind=kind)
            if found.digest == named["digest"]:
                return found
    raise ArtifactError(
        f"{artifact.uri} was made of the {kind} {named['digest'][:12]}, which is neither at {named['uri']} "
        f"nor at {beside}: copy it to one of these places"
    )


def _require(artifact: Artifact | None) -> Artifact:
    assert artifact is not None  # every index and every fusion is made of embeddings
    return artifact


def run_of(uri: str) -> str:
    """The folder of the run that an artifact lies in: ``{run_dir}/{stage}/{fingerprint}``."""
    return uri.rstrip("/").rsplit("/", 2)[0]


def location_of(artifact: Artifact) -> Location:
    """Where an artifact lies, and its kind."""
    return artifact.uri, artifact.manifest.kind


def _optional(artifact: Artifact | None) -> Location | None:
    return None if artifact is None else location_of(artifact)
