"""Publish towers: each tower of an artifact as a folder, or a student and its teacher as one Router folder.

`SentenceTransformer(folder)` loads a Router folder; queries pass the student, documents the teacher:

    modules.json                        Router, then Normalize if embeddings are compared by cosine
    router_config.json                  the modules of both routes
    query_0_StaticEmbedding/, ...       the student, in float32; Normalize if embeddings are compared by dot
    document_0_Transformer/, ...        the teacher: a copy, or `document_0_ReferencedModel/`, only its name
    config_sentence_transformers.json   the prompt of each route, and the similarity of the teacher
    README.md                           model card (models/card.py)

`encode_query` and `encode_document` return the embeddings of our encoders, normalised. If the teacher
compares by dot, documents keep their length and queries get length 1. This changes no ranking: all scores of
a query are the teacher's times one factor. `encode` without a role takes the document route with its prompt:
documents encoded by the student would stay in an index, but queries encoded by the teacher are only slower.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.model_files import read_json, write_json
from scalingnote.models import library_export, published_model
from scalingnote.models.card import CardFacts, router_card, tower_card
from scalingnote.models.lookup_table import Table, is_static, write_published
from scalingnote.models.published_model import LOOKUP_TABLE, REFERENCED_MODEL, Module, Role, Similarity
from scalingnote.storage.artifact import Artifact, Manifest, open_artifact

_BASE = "sentence_transformers.base.modules"
_NORMALIZE = f"{_BASE}.normalize.Normalize"
_STATIC_EMBEDDING = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
# The files of a module in its model's root folder have these suffixes. The files below, which belong to the
# model or to this package, are excepted.
_MODULE_SUFFIXES = {".json", ".txt", ".model", ".safetensors", ".jinja"}
_NOT_OF_A_MODULE = {
    *("modules.json", "config_sentence_transformers.json", "router_config.json", "model_index.json"),
    *("tower.json", "onnx.json", "golden.json", "projection.safetensors", "sparse_head.safetensors"),
}


@dataclass(frozen=True)
class _Side:
    """A tower's folder: a table, or the modules of a route."""

    tower: Mapping[str, Any]  # tower.json; empty of a published model
    modules: Sequence[Module]  # empty for a table
    dim: int | None  # of an embedding, truncated; None: unknown
    prompt: str
    truncated: bool  # whether the model truncates its embeddings


def write_router(
    query: Path,
    document: Path | None,
    folder: Path,
    *,
    document_reference: str | None = None,
    facts: CardFacts | None = None,
) -> None:
    """Write a student and its teacher as one model of sentence-transformers.

    Args:
        query: the student's folder, `query/` of an artifact: a lookup table, or a transformer whose folder
            sentence-transformers reads.
        document: the teacher's folder: `document/` of an artifact, or a published model's; None: no route.
        folder: where to write. Route folders of an earlier call are replaced, other files are kept.
        document_reference: a hub id, "id@revision", or a folder. The model of this name then encodes
            documents. It is loaded when the router is loaded; no file of `document` is copied.
        facts: facts of the model card that are not in the folders.

    Raises:
        ConfigError: the towers' dimensions differ, a folder has no modules.json or holds only adapters, a
            module needs its own code, documents are compared neither by cosine nor by dot, or `folder` holds
            another model.
    """
    # All checks come before the first file is removed or written.
    sides: dict[Role, _Side] = {"query": _side(query, "query")}
    similarity: Similarity = "cosine"
    if document is not None:
        sides["document"] = _side(document, "document")
        similarity = published_model.similarity_of(document)
        if document_reference is not None:
            _check_reference(document_reference, document)
    dims = {role: side.dim for role, side in sides.items() if side.dim is not None}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"the query tower gives embeddings of {dims['query']} dimensions, the document tower of "
            f"{dims['document']}: choose towers with equal dimensions"
        )
    _clear(folder)
    student = sides["query"].modules
    types = {"query": _copy(query, student, folder, "query") if student else _write_table(query, folder)}
    if document is not None and document_reference is not None:
        length = sides["document"].tower.get("max_length")
        types["document"] = _write_reference(document_reference, length, folder)
    elif document is not None:
        types["document"] = _copy(document, sides["document"].modules, folder, "document")
    if similarity == "dot" and not (student and student[-1].name == "Normalize"):
        path = _write_normalise(folder / f"query_{len(types['query'])}_Normalize")
        types["query"][path] = _NORMALIZE
    _write_lists(folder, types, similarity)
    dim = next(iter(dims.values()), None)
    library_export.write_settings(
        folder,
        {role: side.prompt for role, side in sides.items()},
        default="document" if document is not None and sides["document"].prompt else None,
        truncate_dim=dim if any(side.truncated for side in sides.values()) else None,
        similarity=similarity,
    )
    text = router_card(folder, teacher=document, reference=document_reference, facts=facts or CardFacts())
    (folder / "README.md").write_text(text, encoding="utf-8")


def split_reference(reference: str) -> tuple[str, str | None]:
    """Split "id@revision" into hub id and revision; the path of a folder, which may contain @, has none."""
    if Path(reference).is_dir():
        return str(Path(reference).resolve()), None
    model, _, revision = reference.partition("@")
    return model, revision or None


def _side(folder: Path, role: Role) -> _Side:
    tower = read_json(folder / "tower.json") or {}
    if tower.get("role", role) != role:
        raise ConfigError(f"{folder} holds a {tower['role']} tower, not a {role} tower")
    modules = [] if tower.get("kind") == "lookup" else _modules(folder, role)
    keep = published_model.model_settings(folder).get("truncate_dim")
    dim = tower.get("dim") or _dim(modules)
    dim = dim if keep is None or dim is None else min(dim, keep)
    return _Side(tower, modules, dim, published_model.role_prompt(folder, role), keep is not None)


def _dim(modules: Sequence[Module]) -> int | None:
    """Return the width of a published model's embeddings by its modules' configs; None if not stated."""
    dim = None
    for module in modules:
        config = read_json(module.folder / "config.json") or {}
        match module.name:
            case "Transformer":
                dim = config.get("hidden_size") or config.get("text_config", {}).get("hidden_size")
            case "Pooling":
                modes = config.get("pooling_mode")
                count = len(modes) if isinstance(modes, list) else 1
                legacy = sum(bool(value) for key, value in config.items() if key.startswith("pooling_mode_"))
                dim = None if dim is None else dim * max(count, legacy)
            case "Dense":
                dim = config.get("out_features")
    return dim


def _modules(folder: Path, role: Role) -> list[Module]:
    """Return the modules to copy; raise ConfigError if sentence-transformers could not load the copy."""
    modules = published_model.read_modules(folder, role)
    if not modules:
        raise ConfigError(
            f"{folder} has no modules.json, so sentence-transformers cannot load it: adopt the model, or "
            "save the tower with its adapters merged"
        )
    for module in modules:
        ours = module.type in (LOOKUP_TABLE, REFERENCED_MODEL)
        if not ours and not module.type.startswith("sentence_transformers."):
            raise ConfigError(f"{folder}: the module {module.type} needs its own code, which is not copied")
        if module.kwargs:
            raise ConfigError(
                f"{folder}: {module.name} takes {', '.join(module.kwargs)} from `encode`, which a Router "
                "does not pass on"
            )
        if (module.folder / "adapter_config.json").exists():
            raise ConfigError(f"{folder} holds only adapters: save the tower with its adapters merged")
        if module.name == "Transformer" and not any(module.folder.glob("*.safetensors")):
            raise ConfigError(f"{module.folder} has no safetensors: convert its weights first")
    return modules


def _check_reference(reference: str, document: Path) -> None:
    """Raise ConfigError if a referenced folder has other modules than the document tower."""
    model, _ = split_reference(reference)
    if not Path(model).is_dir():
        return
    names = (
        [module.name for module in published_model.read_modules(folder, "document") or ()]
        for folder in (Path(model), document)
    )
    model_modules, tower_modules = ([name for name in route if name != "Normalize"] for route in names)
    if model_modules != tower_modules:
        raise ConfigError(
            f"{model} has the modules {', '.join(model_modules) or 'none'}, the document tower {document} "
            f"has {', '.join(tower_modules)}: write a copy, without document_reference"
        )


def _clear(folder: Path) -> None:
    """Make the folder, or remove the routes of an earlier call."""
    earlier = read_json(folder / "router_config.json")
    others = [name for name in ("modules.json", "config.json", "tower.json") if (folder / name).exists()]
    if earlier is None and others:
        raise ConfigError(f"{folder} holds another model ({', '.join(others)}): choose a new folder")
    for name in (earlier or {}).get("types", {}):
        if Path(name).name == name:
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _write_table(source: Path, folder: Path) -> dict[str, str]:
    table = Table.read(source)
    if is_static(table):
        embedding, dense = "query_0_StaticEmbedding", "query_1_Dense"
        write_published(table, folder / embedding, folder / dense)
        return {embedding: _STATIC_EMBEDDING, dense: f"{_BASE}.dense.Dense"}
    table.write(folder / "query_0_LookupTable")
    return {"query_0_LookupTable": LOOKUP_TABLE}


def _write_reference(reference: str, max_length: int | None, folder: Path) -> dict[str, str]:
    model, revision = split_reference(reference)
    name = "document_0_ReferencedModel"
    (folder / name).mkdir()
    settings = {"model": model, "revision": revision, "max_seq_length": max_length}
    write_json(folder / name / "config.json", settings)
    return {name: REFERENCED_MODEL}


def _copy(source: Path, modules: Sequence[Module], folder: Path, role: Role) -> dict[str, str]:
    """Copy the modules of a route and return their types by folder name, in order."""
    types = {}
    for number, module in enumerate(modules):
        name = f"{role}_{number}_{module.type.rpartition('.')[2]}"
        types[name] = module.type
        if module.folder.resolve() != source.resolve():
            if module.folder.exists():  # old models have no folder for modules without settings
                shutil.copytree(module.folder, folder / name)
            continue
        (folder / name).mkdir()
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in _MODULE_SUFFIXES and path.name not in _NOT_OF_A_MODULE:
                shutil.copyfile(path, folder / name / path.name)
    return types


def _write_normalise(place: Path) -> str:
    """Write a Normalize module and return the name of its folder."""
    place.mkdir(exist_ok=True)
    write_json(place / "config.json", {})
    return place.name


def _write_lists(folder: Path, types: dict[str, dict[str, str]], similarity: Similarity) -> None:
    write_json(
        folder / "router_config.json",
        {
            "types": {name: kind for route in types.values() for name, kind in route.items()},
            "structure": {role: [*route] for role, route in types.items()},
            "parameters": {"default_route": [*types][-1], "allow_empty_key": True, "route_mappings": {}},
        },
    )
    modules = [("", f"{_BASE}.router.Router")]
    if similarity == "cosine":
        modules.append((_write_normalise(folder / "1_Normalize"), _NORMALIZE))
    library_export.write_module_list(folder, modules)


def publish(artifact: Artifact, folder: Path, *, metrics: Mapping[str, float] | None = None) -> list[Path]:
    """Copy every tower of an artifact, a dual encoder or a student, below `folder`, with a model card.

    The cards print `metrics`. Return the towers' folders, which transformers, sentence-transformers and this
    package read. Raise ArtifactError if `artifact` holds no tower.
    """
    names = [name.split("/")[0] for name in artifact.names(suffix="/tower.json")]
    if not names:
        raise ArtifactError(f"{artifact.uri} ({artifact.manifest.kind}) holds no tower to publish")
    for name in names:
        shutil.copytree(artifact.directory(name), folder / name, dirs_exist_ok=True)
        facts = json.loads((folder / name / "tower.json").read_text())
        facts["whole"] = (folder / name / "modules.json").exists()
        text = tower_card(artifact.manifest, facts, ancestors=_ancestors(artifact), metrics=metrics)
        (folder / name / "README.md").write_text(text)
    return [folder / name for name in names]


def _ancestors(artifact: Artifact) -> dict[str, Manifest]:
    """Return the manifests of all existing ancestors by kind; the nearest if a kind has several."""
    manifests: dict[str, Manifest] = {}
    queue = [artifact]
    while queue:
        for kind, reference in queue.pop(0).manifest.parents.items():
            try:
                parent = open_artifact(reference["uri"], kind=kind)
            except ArtifactError:
                continue
            if parent.digest == reference["digest"] and kind not in manifests:
                manifests[kind] = parent.manifest
                queue.append(parent)
    return manifests
