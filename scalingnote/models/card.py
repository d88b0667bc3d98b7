"""Model cards: Markdown with a YAML head that the Hugging Face hub reads.

    tower_card    one tower of an artifact: base model, data, losses and sizes from the artifacts' manifests
    router_card   a student and its teacher in one folder: their use, their sizes, measured quality

The texts are templates of :mod:`scalingnote.core.reports`. Unknown facts are left out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load
from safetensors import safe_open

from scalingnote.core import __version__
from scalingnote.core.model_files import read_json
from scalingnote.core.reports import ReportTable, render
from scalingnote.models.library_export import document_layout
from scalingnote.models.prompt import BOUNDARY
from scalingnote.models.published_model import (
    LOOKUP_TABLE,
    REFERENCED_MODEL,
    TABLES,
    Module,
    Role,
    read_modules,
    role_prompt,
    similarity_name,
)
from scalingnote.storage.artifact import Manifest

_NO_TOKEN_LIMIT = 1 << 24  # transformers writes a larger number if no limit is stated
_SUPPORTED_MODULES = {"Transformer", "Pooling", "Dense", "Normalize", "Dropout", REFERENCED_MODEL}
# Sections of a trained tower's settings that its card prints.
_PRINTED = (
    *("student", "query", "document", "losses", "sparse", "align", "optimizer"),
    *("global_batch", "epochs", "seed"),
)


def tower_card(
    manifest: Manifest,
    facts: Mapping[str, Any],
    *,
    ancestors: Mapping[str, Manifest],
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Return the card of one tower of an artifact.

    `facts` are the tower's tower.json and `whole`, whether its folder holds a complete model; `ancestors` are
    the existing manifests, by kind, of the artifacts that it was made from.
    """
    config, role, teacher = manifest.config, facts["role"], ancestors.get("dual_encoder")
    trained, table = "losses" in config, facts.get("kind") == "lookup"
    if trained:  # a backbone from scratch has no path, a lookup table no backbone
        base_model = _base_model(config, role)
    else:
        base_model = config.get("query_path") or config["path"] if role == "query" else config["path"]
    settings = {name: config[name] for name in _PRINTED if config.get(name) is not None}
    library = None if table else "sentence-transformers"
    head = ModelCardData(
        library_name=library,
        pipeline_tag="sentence-similarity",
        base_model=base_model,
        tags=[*([library] if library else []), "feature-extraction", "dense-retrieval", "scalingnote"],
    )
    layout = None
    if trained and role == "document" and facts["whole"] and facts.get("kind") != "native":
        layout = json.dumps(document_layout(facts["prompt"], causal=facts["causal"]), ensure_ascii=False)
    return render(
        "tower_card.md",
        head=head.to_yaml(),
        facts=facts,
        texts="Queries" if role == "query" else "Documents",
        table=table,
        layout=layout,
        boundary=BOUNDARY,
        training=_training(manifest, facts, ancestors.get("dataset")) if trained else None,
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
        # A student has the similarity of its teacher, because it finds the teacher's documents.
        similarity="cosine" if teacher is None else teacher.info.get("similarity", "cosine"),
        path=base_model,
        prompt=json.dumps(facts.get("prompt"), ensure_ascii=False),
        weights=manifest.info.get("weights_sha256", {}).get(role, {}),
        measured=_measures_table(metrics) if metrics else None,
        digest=manifest.digest[:16],
        created=manifest.info.get("created", "at an unknown time"),
    )


def _base_model(config: Mapping[str, Any], role: str) -> str | None:
    """Return the path of a trained tower's backbone; a token-wise tower may use that of documents."""
    settings = config["student" if "student" in config and role == "query" else role]
    if settings.get("kind") == "token_wise" and settings["backbone"] is None:
        settings = config["document"]
    path: str | None = (settings.get("backbone") or {}).get("path")
    return path


def _training(manifest: Manifest, facts: Mapping[str, Any], dataset: Manifest | None) -> list[str]:
    """Return facts of a tower's training that are not settings, one per line."""
    distilled = "student" in manifest.config
    lines = [f"Stage: {'distilled from a teacher query tower' if distilled else 'contrastive, both towers'}"]
    if facts.get("kind") == "lookup":
        lines.append(f"Table: {table_description(facts)}")
    lines.append(f"Data: {', '.join(f'{count:,} {name}' for name, count in manifest.counts.items())}")
    if dataset is None:
        return [*lines, "Dataset: its artifact had been deleted when this card was written"]
    name = dataset.info.get("description") or dataset.config.get("name") or "see the dataset artifact"
    clicks = "simulated from judged data" if dataset.info.get("simulated_clicks") else "as logged"
    return [*lines, f"Dataset: {name}", f"Clicks: {clicks}"]


@dataclass(frozen=True)
class CardFacts:
    """Facts of a router's card that are not in its folders; each may be unknown."""

    base_model: str | None = None  # hub id of the teacher
    lessons: int | None = None  # number of texts that the student was trained on
    made: str | None = None  # a sentence on how the student was trained
    lengths: str = ""  # in words, how long documents were divided or cut
    agreement: Mapping[str, float] = field(default_factory=dict)  # measure -> value, of student and teacher


def router_card(folder: Path, *, teacher: Path | None, reference: str | None, facts: CardFacts) -> str:
    """Return the card of a folder that :func:`scalingnote.models.publish.write_router` wrote.

    `teacher` is the folder that the modules of documents came from. `reference` is the name by which the
    document model is loaded, None if it was copied. The card in the referenced folder, else in `teacher`,
    states license and language. Without a teacher the folder encodes only queries.
    """
    roles: tuple[Role, ...] = ("query",) if teacher is None else ("query", "document")
    routes = {role: read_modules(folder, role) or [] for role in roles}
    columns = [_route_column(folder, role, routes[role], reference) for role in roles]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    is_table = routes["query"][0].name in TABLES
    # A reference that is not a folder is a hub id, perhaps with a revision.
    is_folder = reference is not None and Path(reference).is_dir()
    source = Path(reference) if reference and is_folder else teacher
    readme = None if source is None else source / "README.md"
    teacher_card: Mapping[str, Any] = (metadata_load(readme) or {}) if readme and readme.exists() else {}
    base = facts.base_model or (reference.partition("@")[0] if reference and not is_folder else None)
    tags = ["sentence-transformers", "sentence-similarity", "feature-extraction", "dense-retrieval"]
    head = ModelCardData(
        language=teacher_card.get("language"),
        license=teacher_card.get("license"),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        base_model=[base] if base else None,
        tags=[*tags, "router", "asymmetric", *(["static-embeddings"] if is_table else []), "scalingnote"],
    )
    return render(
        "router_card.md",
        head=head.to_yaml(),
        name=folder.resolve().name,
        student=_student(routes["query"]),
        teacher=None if teacher is None else _teacher(reference, facts),
        similarity=similarity_name(folder),
        own_code=any(m.type.startswith("scalingnote.") for route in routes.values() for m in route),
        is_table=is_table,
        reads_documents={module.name for module in routes.get("document", ())} <= _SUPPORTED_MODULES,
        routes=ReportTable(["", "queries", "documents"][: len(roles) + 1], rows, text=3),
        agreement=_measures_table(facts.agreement) if facts.agreement else None,
        facts=facts,
        version=__version__,
    )


def _measures_table(measures: Mapping[str, float]) -> ReportTable:
    return ReportTable(["measure", "value"], [[name, f"{value:.4f}"] for name, value in measures.items()])


def table_description(tower: Mapping[str, Any]) -> str:
    """Describe a lookup table in words; `tower` is its tower.json."""
    features = f" and {tower['features']:,} pairs and end tokens" if tower.get("features") else ""
    attention = ", one head of attention over them" if tower["attention"] else ""
    return f"rows of {tower['tokens']:,} tokens{features} as {tower['storage']}{attention}"


def _student(route: Sequence[Module]) -> str:
    first = route[0]
    if first.name == LOOKUP_TABLE:
        table = table_description(read_json(first.folder / "tower.json"))
        return f"a lookup table ({table}; no transformer runs)"
    if first.name in TABLES:
        with safe_open(first.folder / "model.safetensors", "np") as weights:
            rows, dim = weights.get_slice("embedding.weight").get_shape()
        return f"a lookup table ({rows:,} rows of {dim} dimensions; no transformer runs)"
    layers = (read_json(first.folder / "config.json") or {}).get("num_hidden_layers")
    return f"a transformer of {layers} layers" if layers else "a small model"


def _teacher(reference: str | None, facts: CardFacts) -> str:
    name = facts.base_model or reference
    how = "which is loaded by its name" if reference else "which is copied into this folder"
    return f"`{name}`, {how}" if name else f"their teacher, {how}"


def _route_column(folder: Path, role: Role, route: Sequence[Module], reference: str | None) -> dict[str, str]:
    """Return one column of the table of routes; the size of a referenced document model is left out."""
    copied_modules = [
        module for module in route if module.folder.is_relative_to(folder) and module.folder != folder
    ]
    size = sum(
        path.stat().st_size
        for module in copied_modules
        for path in module.folder.rglob("*")
        if path.is_file()
    )
    prompt = role_prompt(folder, role)
    return {
        "modules": ", ".join(module.name.rpartition(".")[2] for module in route),
        "size": f"`{reference}`, not copied" if reference and role == "document" else f"{size / 1e6:,.1f} MB",
        "tokens read": _token_limit(route[0].folder),
        "prompt": f"`{prompt}`" if prompt else "none",
    }


def _token_limit(folder: Path) -> str:
    """Return the maximum tokens of a text in the first module of a route, in words."""
    settings = read_json(folder / "sentence_bert_config.json")
    if settings is not None:  # a transformer: its tokenizer.json does not limit the length
        tokenizer = read_json(folder / "tokenizer_config.json") or {}
        limits = [settings.get("max_seq_length"), tokenizer.get("model_max_length")]
    else:
        tower, config = (read_json(folder / name) or {} for name in ("tower.json", "config.json"))
        truncation = (read_json(folder / "tokenizer.json") or {}).get("truncation") or {}
        limits = [tower.get("max_length"), config.get("max_seq_length"), truncation.get("max_length")]
    limit = next((limit for limit in limits if limit), None)
    return f"{limit:,}" if limit and limit < _NO_TOKEN_LIMIT else "as the model allows"
