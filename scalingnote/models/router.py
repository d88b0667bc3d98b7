"""One folder that `SentenceTransformer(folder)` loads: queries pass a student, documents its teacher.

    modules.json                        Router, then Normalize
    router_config.json                  the modules of both routes
    query_0_StaticEmbedding/, ...       the student, in float32
    document_0_Transformer/, ...        the teacher: a copy, or `document_0_ReferencedModel/`, its name alone
    config_sentence_transformers.json   the prompt of each route
    README.md                           model card (models/card.py)

`encode_query` and `encode_document` give our encoders' embeddings, divided by their lengths. `encode` without
a role takes the document route, with its prompt: a document that a student encoded would stay in an index,
while a query that the teacher encoded is only slower.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalingnote.errors import ConfigError
from scalingnote.models import card, export, module_list, static_embedding
from scalingnote.models.card import CardFacts
from scalingnote.models.module_list import LOOKUP_TABLE, REFERENCED_MODEL, Module, Role
from scalingnote.models.table import Table

_BASE = "sentence_transformers.base.modules"
_STATIC_EMBEDDING = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
# Files of a module that lies in its model's root; what else lies there belongs to the model or to us.
_SUFFIXES = {".json", ".txt", ".model", ".safetensors", ".jinja"}
_NOT_OF_A_MODULE = {
    *("modules.json", "config_sentence_transformers.json", "router_config.json", "model_index.json"),
    *("tower.json", "onnx.json", "golden.json", "projection.safetensors", "sparse_head.safetensors"),
}


@dataclass(frozen=True)
class _Side:
    """What a tower's folder says beside its modules."""

    dim: int | None  # of an embedding, truncated; None: its files do not say
    prompt: str
    truncated: bool  # whether the model truncates its embeddings


def write_router(
    query: Path,
    document: Path,
    folder: Path,
    *,
    document_reference: str | None = None,
    facts: CardFacts | None = None,
) -> None:
    """Write a student and its teacher as one model of sentence-transformers.

    Args:
        query: the student's folder, `query/` of an artifact: a lookup table, or a transformer whose folder
            sentence-transformers reads.
        document: the teacher's folder: `document/` of an artifact, or a published model's.
        folder: where to write. Route folders of an earlier call are replaced, other files are kept.
        document_reference: a hub id, "id@revision", or a folder. Documents are then encoded by the model of
            this name, loaded where the router is loaded; nothing of `document` is copied.
        facts: what the model card says beyond the folders.

    Raises:
        ConfigError: the towers' dimensions differ, a folder has no modules.json or holds adapters alone, a
            module needs code of its own, or `folder` holds another model.
    """
    sides: dict[Role, _Side] = {"query": _side(query, "query"), "document": _side(document, "document")}
    dims = {role: side.dim for role, side in sides.items() if side.dim is not None}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"the query tower gives embeddings of {dims['query']} dimensions, the document tower of "
            f"{dims['document']}: both routes need the same"
        )
    query_modules = [] if _is_table(query) else _modules(query, "query")
    document_modules = _modules(document, "document")
    if document_reference is not None:
        _check_reference(document_reference, document)
    _clear(folder)
    types = {
        "query": _copy(query, query_modules, folder, "query")
        if query_modules
        else _write_table(query, folder),
        "document": _copy(document, document_modules, folder, "document")
        if document_reference is None
        else _write_reference(document_reference, document, folder),
    }
    _write_lists(folder, types)
    dim = next(iter(dims.values()), None)
    export.describe(
        folder,
        {role: side.prompt for role, side in sides.items()},
        default="document" if sides["document"].prompt else None,
        truncate_dim=dim if any(side.truncated for side in sides.values()) else None,
    )
    text = card.router_card(
        folder, teacher=document, reference=document_reference, facts=facts or CardFacts()
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def split_reference(reference: str) -> tuple[str, str | None]:
    """Hub id or folder, and revision, of "id@revision", "id" or a folder, which may have an @ in its path."""
    if Path(reference).is_dir():
        return str(Path(reference).resolve()), None
    model, _, revision = reference.partition("@")
    return model, revision or None


def _is_table(folder: Path) -> bool:
    return (module_list.read_json(folder / "tower.json") or {}).get("kind") == "lookup"


def _side(folder: Path, role: Role) -> _Side:
    tower: dict[str, Any] = module_list.read_json(folder / "tower.json") or {}
    if tower.get("role", role) != role:
        raise ConfigError(f"{folder} holds a {tower['role']} tower, not a {role} tower")
    if tower.get("kind") == "lookup":
        return _Side(tower["dim"], "", truncated=False)
    keep = module_list.settings_of(folder).get("truncate_dim")
    dim = tower.get("dim") or _dim(_modules(folder, role))
    return _Side(
        dim if keep is None or dim is None else min(dim, keep),
        module_list.prompt_of(folder, role),
        keep is not None,
    )


def _dim(modules: Sequence[Module]) -> int | None:
    """Width of a published model's embeddings by its modules' configs; None where they do not say."""
    dim = None
    for module in modules:
        config = module_list.read_json(module.folder / "config.json") or {}
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
    """The modules to copy. ConfigError where sentence-transformers could not load the copy."""
    modules = module_list.read(folder, role)
    if not modules:
        raise ConfigError(
            f"{folder} has no modules.json, so sentence-transformers cannot load it: adopt the model, or "
            "save the tower with its adapters merged"
        )
    for module in modules:
        ours = module.type in (LOOKUP_TABLE, REFERENCED_MODEL)
        if not ours and not module.type.startswith("sentence_transformers."):
            raise ConfigError(
                f"{folder}: the module {module.type} needs code of its own, which is not copied"
            )
        if module.kwargs:
            raise ConfigError(
                f"{folder}: {module.name} takes {', '.join(module.kwargs)} from `encode`, which a Router "
                "does not pass on"
            )
        if (module.folder / "adapter_config.json").exists():
            raise ConfigError(f"{folder} holds adapters alone: save the tower with its adapters merged")
        if module.name == "Transformer" and not any(module.folder.glob("*.safetensors")):
            raise ConfigError(f"{module.folder} has no safetensors: convert its weights first")
    return modules


def _check_reference(reference: str, document: Path) -> None:
    """ConfigError where a referenced folder pools or projects otherwise than the document tower."""
    model, _ = split_reference(reference)
    if not Path(model).is_dir():
        return
    named, taught = (
        [module.name for module in module_list.read(folder, "document") or () if module.name != "Normalize"]
        for folder in (Path(model), document)
    )
    if named != taught:
        raise ConfigError(
            f"{model} has the modules {', '.join(named) or 'none'}, the document tower {document} has "
            f"{', '.join(taught)}: write a copy, without document_reference"
        )


def _clear(folder: Path) -> None:
    """Make the folder, or take the routes of an earlier call away."""
    earlier = module_list.read_json(folder / "router_config.json")
    others = [name for name in ("modules.json", "config.json", "tower.json") if (folder / name).exists()]
    if earlier is None and others:
        raise ConfigError(f"{folder} holds another model ({', '.join(others)}): give a new folder")
    for name in (earlier or {}).get("types", {}):
        if Path(name).name == name:
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _write_table(source: Path, folder: Path) -> dict[str, str]:
    table = Table.read(source)
    if static_embedding.is_static(table):
        embedding, dense = "query_0_StaticEmbedding", "query_1_Dense"
        static_embedding.write(table, folder / embedding, folder / dense)
        return {embedding: _STATIC_EMBEDDING, dense: f"{_BASE}.dense.Dense"}
    table.write(folder / "query_0_LookupTable")
    return {"query_0_LookupTable": LOOKUP_TABLE}


def _write_reference(reference: str, document: Path, folder: Path) -> dict[str, str]:
    model, revision = split_reference(reference)
    tower: dict[str, Any] = module_list.read_json(document / "tower.json") or {}
    name = "document_0_ReferencedModel"
    (folder / name).mkdir()
    named = {"model": model, "revision": revision, "max_seq_length": tower.get("max_length")}
    export.write_json(folder / name / "config.json", named)
    return {name: REFERENCED_MODEL}


def _copy(source: Path, modules: Sequence[Module], folder: Path, role: Role) -> dict[str, str]:
    """Copy the modules of a route; returns the types of their folders, in order."""
    types = {}
    for number, module in enumerate(modules):
        name = f"{role}_{number}_{module.type.rpartition('.')[2]}"
        types[name] = module.type
        if module.folder.resolve() != source.resolve():
            if module.folder.exists():  # modules without settings have none in old models
                shutil.copytree(module.folder, folder / name)
            continue
        (folder / name).mkdir()
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in _SUFFIXES and path.name not in _NOT_OF_A_MODULE:
                shutil.copyfile(path, folder / name / path.name)
    return types


def _write_lists(folder: Path, types: dict[str, dict[str, str]]) -> None:
    export.write_json(
        folder / "router_config.json",
        {
            "types": {name: each for route in types.values() for name, each in route.items()},
            "structure": {role: [*route] for role, route in types.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
        },
    )
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{_BASE}.router.Router"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{_BASE}.normalize.Normalize"},
    ]
    export.write_json(folder / "modules.json", modules)
    (folder / "1_Normalize").mkdir(exist_ok=True)
    export.write_json(folder / "1_Normalize" / "config.json", {})
