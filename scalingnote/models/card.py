"""Model cards: Markdown with a YAML head as the Hugging Face hub reads it.

    tower_card    one tower of an artifact: base model, data, losses and sizes from the artifacts' manifests
    router_card   a student and its teacher in one folder: their use, their sizes, measured quality

Unknown facts are left out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import metadata_load
from safetensors import safe_open

from scalingnote.models.library_export import BOUNDARY, document_layout
from scalingnote.models.published_model import (
    LOOKUP_TABLE,
    REFERENCED_MODEL,
    TABLES,
    Module,
    Role,
    read_json,
    read_modules,
    role_prompt,
    similarity_name,
)
from scalingnote.storage.artifact import Manifest
from scalingnote.version import __version__

_NO_TOKEN_LIMIT = 1 << 24  # transformers writes a larger number if no limit is stated
_SUPPORTED_MODULES = {"Transformer", "Pooling", "Dense", "Normalize", "Dropout", REFERENCED_MODEL}
_PAPER = "ScalingNote (arXiv 2411.15766)"
_DISTILLATION_LOSSES = {
    "qkd": "squared distance and cosine (weight {cosine}) to the teacher's query embeddings",
    "cosine": "1 - cosine to the teacher's query embeddings",
    "query_matching": "distance to the teacher's query embeddings",
    "document_matching": "distance to the teacher's document embeddings",
    "one_hot": "cross entropy of labels",
    "scores": "cross entropy with the teacher's scores",
}
_LENGTHS = {
    "cosine": "of length 1; compare them by cosine.",
    "dot": "queries of length 1 and documents of their own length; compare them by dot, which ranks "
    "documents as the teacher does.",
}
_LIBRARY_CODE = (
    "from sentence_transformers import SentenceTransformer",
    "",
    "model = SentenceTransformer(PATH)",
)
_QUERY_ENCODER_CODE = (
    "from pathlib import Path",
    "from scalingnote.encode.query_encoder import QueryEncoder",
    "",
    'QueryEncoder.load(Path(PATH)).encode_queries(["how to join two tensors"])',
)
_DOCUMENT_ENCODER_CODE = (
    "from pathlib import Path",
    "import pyarrow as pa",
    "from scalingnote.encode.encoder import Encoder",
    "",
    'encoder = Encoder.load(Path(PATH), "document")',
    'rows = pa.table({"title": ["torch.cat"], "topic": [""], "content": ["joins tensors by an axis"]})',
    'encoder.encode_documents(rows)["summary"]',
)


def tower_card(
    manifest: Manifest,
    facts: Mapping[str, Any],
    *,
    ancestors: Mapping[str, Manifest],
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Return the card of one tower of an artifact.

    `facts` are the tower's tower.json and `whole`, whether its folder holds a complete model; `ancestors` the
    manifests of the artifacts that it was made from, by kind, as far as they still exist.
    """
    config, role = manifest.config, facts["role"]
    if "losses" not in config:
        return _published_card(manifest, facts)
    settings = config["student" if "student" in config and role == "query" else role]
    if settings.get("kind") == "token_wise" and settings["backbone"] is None:
        settings = {**settings, **{name: config["document"][name] for name in ("backbone", "lora")}}
    table = facts.get("kind") == "lookup"
    stage = "distilled from a teacher query tower" if "student" in config else "contrastive, both towers"
    training = [
        f"Stage: {stage}",
        f"Backbone: {_backbone(settings) if 'backbone' in settings else 'none'}",
        *([f"Table: {table_description(facts)}"] if table else []),
        f"Losses: {_losses(config)}",
        f"Batch {config['global_batch']}, {config['epochs']:g} epochs, peak learning rate "
        f"{config['optimizer']['peak_lr']:g}, seed {config['seed']}",
        f"Data: {', '.join(f'{count:,} {name}' for name, count in manifest.counts.items())}",
        *_dataset(ancestors.get("dataset")),
    ]
    sections = [
        f"One side of a dual encoder trained with ScalingNote, after {_PAPER}. Its embeddings are not "
        f"normalised; compare them by {_teacher_similarity(ancestors)}. "
        f"{'Queries' if role == 'query' else 'Documents'} are read up to {facts['max_length']} tokens.",
        "## Use",
        *_tower_use(facts),
        "## Training",
        "\n".join(f"- {line}" for line in training),
    ]
    if metrics:
        sections += ["## Measured", _table(["measure", "value"], metrics.items(), ruler="|---|---|")]
    # A backbone from scratch has no path, a lookup table no backbone.
    return _tower_page((settings.get("backbone") or {}).get("path"), manifest, facts, sections)


def _teacher_similarity(ancestors: Mapping[str, Manifest]) -> str:
    """Return what search computes: a student's documents are those of its teacher."""
    teacher = ancestors.get("dual_encoder")
    return "cosine" if teacher is None else str(teacher.info.get("similarity", "cosine"))


def _published_card(manifest: Manifest, facts: Mapping[str, Any]) -> str:
    """Return the card of a published model's tower that was not trained."""
    role, config = facts["role"], manifest.config
    path = config.get("query_path") or config["path"] if role == "query" else config["path"]
    example = '["how to join two tensors"]' if role == "query" else '["Title Text of the document"]'
    weights = manifest.info.get("weights_sha256", {}).get(role, {})
    sections = [
        f"`{path}` as published, without any training by ScalingNote. "
        f"{'Queries' if role == 'query' else 'Documents'} are read up to {facts['max_length']} tokens, after "
        f"the prompt {json.dumps(facts['prompt'], ensure_ascii=False)}.",
        "## Use",
        _code(*_LIBRARY_CODE, f"model.encode_{role}({example})"),
    ]
    if weights:
        sections.append("\n".join(f"- `{name}`: sha256 `{digest}`" for name, digest in weights.items()))
    return _tower_page(path, manifest, facts, sections)


def _tower_page(
    base_model: str | None, manifest: Manifest, facts: Mapping[str, Any], sections: Sequence[str]
) -> str:
    """Return YAML head, title, sections and the artifact's digest as one page."""
    table = facts.get("kind") == "lookup"
    library = "" if table else "sentence-transformers, "
    head = [
        *([] if table else ["library_name: sentence-transformers"]),
        "pipeline_tag: sentence-similarity",
        *([f"base_model: {json.dumps(base_model)}"] if base_model else []),
        f"tags: [{library}feature-extraction, dense-retrieval, scalingnote]",
    ]
    title = f"# {facts['role'].capitalize()} tower, {facts['dim']} dimensions"
    created = manifest.info.get("created", "at an unknown time")
    digest = f"Artifact digest `{manifest.digest[:16]}`, built {created}."
    return "\n\n".join(["\n".join(["---", *head, "---", title]), *sections, digest]) + "\n"


def _dataset(dataset: Manifest | None) -> list[str]:
    if dataset is None:
        return ["Dataset: its artifact did not exist any more when this card was written"]
    name = dataset.info.get("description") or dataset.config.get("name") or "see the dataset artifact"
    clicks = "simulated from judged data" if dataset.info.get("simulated_clicks") else "as logged"
    licence = dataset.info.get("licence") or "not stated"
    return [f"Dataset: {name} (licence: {licence})", f"Clicks: {clicks}"]


def _tower_use(facts: Mapping[str, Any]) -> list[str]:
    query = facts["role"] == "query"
    if facts.get("kind") == "lookup":
        return [
            "A query is the mean of its tokens' rows; no model is run:",
            _code(*_QUERY_ENCODER_CODE),
        ]
    if not facts["whole"]:
        call = 'encode_queries(["..."])' if query else "encode_documents(table)"
        return [
            "This folder holds an adapter and the path of its backbone; this package loads both:",
            _code(
                "from pathlib import Path",
                "from scalingnote.encode.encoder import Encoder",
                "",
                f"Encoder.load(Path(PATH)).{call}",
            ),
        ]
    if query:
        return [_code(*_LIBRARY_CODE, 'model.encode(["how to join two tensors"])')]
    if facts.get("kind") == "native":
        return [_code(*_LIBRARY_CODE, 'model.encode_document(["Title Text of the document"])')]
    layout = json.dumps(document_layout(facts["prompt"], causal=facts["causal"]), ensure_ascii=False)
    return [
        _code(
            *_LIBRARY_CODE,
            f"LAYOUT = {layout}",
            'model.encode([LAYOUT.format(title="Title", topic="", content="Text of the document")])',
        ),
        f"`{BOUNDARY}` separates the parts of the prompt and is not read; the rest of the prompt is added "
        "by the tokenizer. The embedding is that of the indexed view; others need this package's `Encoder`. "
        "A title that leaves no room for the prompt is truncated here, but not by `Encoder`.",
    ]


def _backbone(tower: Mapping[str, Any]) -> str:
    backbone, lora = tower["backbone"], tower.get("lora")
    if backbone["kind"] == "pretrained":
        layers = f", first {backbone['layers']} layers" if backbone.get("layers") else ""
        name = f"{backbone['path']}{layers}"
    else:
        sizes = f"{backbone['layers']} layers of {backbone['hidden']}"
        name = f"{backbone['architecture']} from scratch, {sizes}"
    if lora is None:
        return f"{name}, all weights trained"
    stored = {"int8": ", on 8-bit weights", "nf4": ", on 4-bit weights"}.get(lora.get("base", "full"), "")
    kind = "DoRA" if lora["dora"] else "LoRA"
    return f"{name}, {kind} of rank {lora['rank']}, alpha {lora['alpha']:g}{stored}"


def _losses(config: Mapping[str, Any]) -> str:
    losses = config["losses"]
    if "student" in config:
        terms = [
            f"{weight:g} x {_DISTILLATION_LOSSES[name]}"
            for name, weight in losses.items()
            if name in _DISTILLATION_LOSSES and weight
        ]
        return " + ".join(terms).format(cosine=f"{losses['cosine_weight']:g}")
    text = (
        f"contrastive (temperature {losses['temperature']:g}, {losses['denominator'].replace('_', ' ')}) "
        f"+ {losses['alpha']:g} x margin ({losses['margin']:g}), "
        f"Matryoshka prefixes {', '.join(map(str, losses['matryoshka']))}"
    )
    # LightRetriever's losses; manifests of older artifacts have neither key.
    if sparse := config.get("sparse"):
        text += f"; term weights: contrastive (temperature {sparse['temperature']:g})"
        text += f" + {sparse['flops']:g} x FLOPs regulariser"
    if align := config.get("align"):
        text += f"; {align['weight']:g} x KL to the whole query's scores"
    return text


@dataclass(frozen=True)
class CardFacts:
    """Facts of a router's card that its folders do not contain; each may be unknown."""

    name: str | None = None  # of the model; None: its folder's
    base_model: str | None = None  # hub id of the teacher
    license: str | None = None  # None: the teacher's, if its card states one
    language: str | list[str] | None = None  # None: the teacher's
    lessons: int | None = None  # texts that the student was trained on
    datasets: Sequence[str] = ()  # hub ids or names of the data sets with these texts
    made: str | None = None  # a sentence on how the student was trained
    agreement: Mapping[str, float] = field(default_factory=dict)  # measure -> value, of student and teacher
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # data set -> measure -> value


def router_card(folder: Path, *, teacher: Path, reference: str | None, facts: CardFacts) -> str:
    """Return the card of a folder that :func:`scalingnote.models.publish.write_router` wrote.

    The card in `teacher`, where the modules of documents came from, states license and language; `reference`
    is the name that the document model is loaded by, None if it was copied.
    """
    roles: tuple[Role, ...] = ("query", "document")
    routes = {role: read_modules(folder, role) or [] for role in roles}
    columns = [_route_column(folder, role, routes[role], reference) for role in roles]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    name, similarity = facts.name or folder.resolve().name, similarity_name(folder)
    own_code = any(module.type.startswith("scalingnote.") for route in routes.values() for module in route)
    sections = [
        f"---\n{_router_head(name, routes, teacher, reference, facts).to_yaml()}\n---",
        f"# {name}",
        f"Queries are encoded by {_student(routes['query'])}, documents by "
        f"{_teacher(reference, facts)}. Both give embeddings of the same space, {_LENGTHS[similarity]} An "
        "index of the teacher's document embeddings stays as it is: only queries become cheap.",
        "## Use",
        *_library_use(own_code=own_code),
        *_package_use(routes),
        "## The two routes",
        _table(["", "queries", "documents"], rows, ruler="|---|---|---|"),
    ]
    if facts.agreement:
        sections += ["## Agreement with the teacher", _table(["measure", "value"], facts.agreement.items())]
    if facts.metrics:
        values = [(data, *each) for data, measured in facts.metrics.items() for each in measured.items()]
        sections += ["## Measured", _table(["data", "measure", "value"], values)]
    sections += ["## How it was made", "\n".join(f"- {line}" for line in _training(facts))]
    return "\n\n".join(sections) + "\n"


def table_description(tower: Mapping[str, Any]) -> str:
    """Describe a lookup table in words; `tower` is its tower.json."""
    features = f" and {tower['features']:,} pairs and end tokens" if tower.get("features") else ""
    attention = ", one head of attention over them" if tower["attention"] else ""
    return f"rows of {tower['tokens']:,} tokens{features} as {tower['storage']}{attention}"


def _router_head(
    name: str,
    routes: Mapping[Role, Sequence[Module]],
    teacher: Path,
    reference: str | None,
    facts: CardFacts,
) -> ModelCardData:
    # A reference that is no folder is a hub id, perhaps with a revision.
    is_folder = reference is not None and Path(reference).is_dir()
    hub_id = reference.partition("@")[0] if reference and not is_folder else None
    readme = (Path(reference) if reference and is_folder else teacher) / "README.md"
    stated: Mapping[str, Any] = (metadata_load(readme) or {}) if readme.exists() else {}
    tags = ["sentence-transformers", "sentence-similarity", "feature-extraction", "dense-retrieval"]
    tags += ["router", "asymmetric"]
    tags += ["static-embeddings"] if routes["query"][0].name in TABLES else []
    results = [
        EvalResult(
            task_type="information-retrieval",
            task_name="Information Retrieval",
            dataset_type=data.lower().replace(" ", "-"),
            dataset_name=data,
            metric_type=measure.lower().replace("@", "_at_"),
            metric_name=measure,
            metric_value=float(value),
        )
        for data, values in facts.metrics.items()
        for measure, value in values.items()
    ]
    base = facts.base_model or hub_id
    return ModelCardData(
        language=facts.language or stated.get("language"),
        license=facts.license or stated.get("license"),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        base_model=[base] if base else None,
        datasets=[*facts.datasets] or None,
        tags=[*tags, "scalingnote"],
        model_name=name if results else None,
        eval_results=results or None,
    )


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
    how = "which is loaded by its name" if reference else "a copy of which is part of this folder"
    return f"`{name}`, {how}" if name else f"their teacher, {how}"


def _library_use(*, own_code: bool) -> list[str]:
    code = _code(
        "from sentence_transformers import SentenceTransformer",
        "",
        f"model = SentenceTransformer(PATH{', trust_remote_code=True' if own_code else ''})",
        'queries = model.encode_query(["how to join two tensors"])',
        'documents = model.encode_document(["torch.cat joins tensors along an axis."])',
        "model.similarity(queries, documents)",
    )
    why = (
        "This needs `pip install scalingnote`: the flag lets sentence-transformers import a module of that "
        "package. No code comes with the model."
    )
    return [code, why] if own_code else [code]


def _package_use(routes: Mapping[Role, Sequence[Module]]) -> list[str]:
    table = routes["query"][0].name in TABLES
    sections = [
        "With ScalingNote, queries need numpy alone:" if table else "With ScalingNote:",
        _code(*_QUERY_ENCODER_CODE),
    ]
    if {module.name for module in routes["document"]} <= _SUPPORTED_MODULES:
        sections.append(_code(*_DOCUMENT_ENCODER_CODE))
    return sections


def _route_column(folder: Path, role: Role, route: Sequence[Module], reference: str | None) -> dict[str, str]:
    """Return one column of the table of routes; a referenced document model has no size."""
    own = [module for module in route if module.folder.is_relative_to(folder) and module.folder != folder]
    size = sum(path.stat().st_size for module in own for path in module.folder.rglob("*") if path.is_file())
    prompt = role_prompt(folder, role)
    return {
        "modules": ", ".join(module.name.rpartition(".")[2] for module in route),
        "size": f"`{reference}`, not copied" if reference and role == "document" else f"{size / 1e6:,.1f} MB",
        "tokens read": _token_limit(route[0].folder),
        "prompt": f"`{prompt}`" if prompt else "none",
    }


def _token_limit(folder: Path) -> str:
    """Return how many tokens the first module of a route reads of a text."""
    settings = read_json(folder / "sentence_bert_config.json")
    if settings is not None:  # of a transformer, whose tokenizer.json does not limit the length
        tokenizer = read_json(folder / "tokenizer_config.json") or {}
        limits = [settings.get("max_seq_length"), tokenizer.get("model_max_length")]
    else:
        tower, named = (read_json(folder / name) or {} for name in ("tower.json", "config.json"))
        truncation = (read_json(folder / "tokenizer.json") or {}).get("truncation") or {}
        limits = [tower.get("max_length"), named.get("max_seq_length"), truncation.get("max_length")]
    limit = next((limit for limit in limits if limit), None)
    return f"{limit:,}" if limit and limit < _NO_TOKEN_LIMIT else "as the model allows"


def _training(facts: CardFacts) -> Iterator[str]:
    yield (
        f"[ScalingNote](https://arxiv.org/abs/2411.15766) {__version__}: the student learnt to give its "
        "teacher's query embeddings; documents are the teacher's alone."
    )
    if facts.lessons is not None:
        yield f"Lessons: {facts.lessons:,} texts, each encoded once by the teacher as a query."
    if facts.made:
        yield facts.made
    if facts.datasets:
        yield f"Drawn from: {', '.join(facts.datasets)}."


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _table(columns: Sequence[str], rows: Any, *, ruler: str | None = None) -> str:
    """Return a Markdown table; numbers have four decimals. By default the last column is right-aligned."""
    ruler = ruler or "|---" * (len(columns) - 1) + "|--:|"
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    # An empty column name is one blank wide.
    head = "|" + "|".join(f" {name} " if name else " " for name in columns) + "|"
    return "\n".join([head, ruler, *(f"| {' | '.join(row)} |" for row in cells)])
