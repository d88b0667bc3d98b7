"""The model card of a student and its teacher in one folder: what they are, their use, what was measured.

The head is YAML as the Hugging Face hub reads it, written by huggingface_hub's own classes. What is not known
is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import metadata_load
from safetensors import safe_open

from scalingnote import __version__
from scalingnote.models import module_list
from scalingnote.models.module_list import LOOKUP_TABLE, REFERENCED_MODEL, Module, Role

_MEGABYTE = 1e6  # bytes
_NO_LIMIT = 1 << 24  # tokens; transformers writes a larger number where nothing is stated
_READ_BY_US = {"Transformer", "Pooling", "Dense", "Normalize", "Dropout", REFERENCED_MODEL}


@dataclass(frozen=True)
class CardFacts:
    """What a card says beyond the folders that it describes; all of it may be unknown."""

    name: str | None = None  # of the model; None: its folder's
    base_model: str | None = None  # hub id of the teacher
    license: str | None = None  # None: the teacher's, where its card states one
    language: str | list[str] | None = None  # None: the teacher's
    lessons: int | None = None  # texts that the student learnt from
    datasets: Sequence[str] = ()  # hub ids or names of what they were drawn from
    made: str | None = None  # a sentence on how the student was trained
    agreement: Mapping[str, float] = field(default_factory=dict)  # measure -> value, of student and teacher
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # data set -> measure -> value


def router_card(folder: Path, *, teacher: Path, reference: str | None, facts: CardFacts) -> str:
    """Markdown of a folder that :func:`scalingnote.models.router.write_router` wrote.

    Args:
        folder: the folder, complete but for its card.
        teacher: the folder that documents' modules came from; its card states license and language.
        reference: the name that documents' model is loaded by; None: it was copied.
        facts: what the folders do not say.
    """
    routes: dict[Role, list[Module]] = {
        role: module_list.read(folder, role) or [] for role in ("query", "document")
    }
    name = facts.name or folder.resolve().name
    own_code = any(module.type.startswith("scalingnote.") for route in routes.values() for module in route)
    parts = [
        f"---\n{_head(name, routes, teacher, reference, facts).to_yaml()}\n---",
        f"# {name}",
        f"Queries are encoded by {_student(routes['query'])}, documents by "
        f"{_teacher(reference, facts)}. Both give embeddings of the same space, of length 1; compare them by "
        "cosine. An index of the teacher's document embeddings stays as it is: only queries become cheap.",
        "## Use",
        *_library_use(own_code=own_code),
        *_package_use(routes),
        "## The two routes",
        "\n".join(_routes_table(folder, routes, reference)),
    ]
    if facts.agreement:
        rows = [f"| {measure} | {value:.4f} |" for measure, value in facts.agreement.items()]
        parts += ["## Agreement with the teacher", "\n".join(["| measure | value |", "|---|--:|", *rows])]
    if facts.metrics:
        rows = [f"| {data} | {measure} | {value:.4f} |" for data, measure, value in _each(facts.metrics)]
        parts += ["## Measured", "\n".join(["| data | measure | value |", "|---|---|--:|", *rows])]
    parts += ["## How it was made", "\n".join(_made(facts))]
    return "\n\n".join(parts) + "\n"


def described_table(tower: Mapping[str, Any]) -> str:
    """A lookup table in words; `tower` is its tower.json."""
    features = f" and {tower['features']:,} pairs and end tokens" if tower.get("features") else ""
    attention = ", one head of attention over them" if tower["attention"] else ""
    return f"rows of {tower['tokens']:,} tokens{features} as {tower['storage']}{attention}"


def _head(
    name: str,
    routes: Mapping[Role, Sequence[Module]],
    teacher: Path,
    reference: str | None,
    facts: CardFacts,
) -> ModelCardData:
    stated = _stated(Path(reference)) if reference and Path(reference).is_dir() else _stated(teacher)
    table = routes["query"][0].name in module_list.TABLES
    tags = ["sentence-transformers", "sentence-similarity", "feature-extraction", "dense-retrieval"]
    tags += ["router", "asymmetric", *(["static-embeddings"] if table else []), "scalingnote"]
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
        for data, measure, value in _each(facts.metrics)
    ]
    base = facts.base_model or _hub_id(reference)
    return ModelCardData(
        language=facts.language or stated.get("language"),
        license=facts.license or stated.get("license"),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        base_model=[base] if base else None,
        datasets=[*facts.datasets] or None,
        tags=tags,
        model_name=name if results else None,
        eval_results=results or None,
    )


def _stated(teacher: Path) -> Mapping[str, Any]:
    """The head of the teacher's own card; empty where it has none."""
    path = teacher / "README.md"
    return (metadata_load(path) or {}) if path.exists() else {}


def _hub_id(reference: str | None) -> str | None:
    """A reference where it is the name of a model on the hub, without its revision."""
    if reference is None or Path(reference).is_dir():
        return None
    return reference.partition("@")[0]


def _each(metrics: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str, float]]:
    for data, values in metrics.items():
        for measure, value in values.items():
            yield data, measure, value


def _student(route: Sequence[Module]) -> str:
    first = route[0]
    if first.name == LOOKUP_TABLE:
        tower = module_list.read_json(first.folder / "tower.json")
        return f"a lookup table ({described_table(tower)}; no transformer runs)"
    if first.name in module_list.TABLES:
        with safe_open(first.folder / "model.safetensors", "np") as weights:
            rows, dim = weights.get_slice("embedding.weight").get_shape()
        return f"a lookup table ({rows:,} rows of {dim} dimensions; no transformer runs)"
    layers = (module_list.read_json(first.folder / "config.json") or {}).get("num_hidden_layers")
    return f"a transformer of {layers} layers" if layers else "a small model"


def _teacher(reference: str | None, facts: CardFacts) -> str:
    named = facts.base_model or reference
    how = "which is loaded by its name" if reference else "a copy of which is part of this folder"
    return f"`{named}`, {how}" if named else f"their teacher, {how}"


def _library_use(*, own_code: bool) -> list[str]:
    argument = ", trust_remote_code=True" if own_code else ""
    code = [
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        f"model = SentenceTransformer(PATH{argument})",
        'queries = model.encode_query(["how to join two tensors"])',
        'documents = model.encode_document(["torch.cat joins tensors along an axis."])',
        "model.similarity(queries, documents)",
        "```",
    ]
    why = (
        "This needs `pip install scalingnote`: the flag lets sentence-transformers import a module of that "
        "package. No code comes with the model."
    )
    return ["\n".join(code), *([why] if own_code else [])]


def _package_use(routes: Mapping[Role, Sequence[Module]]) -> list[str]:
    table = routes["query"][0].name in module_list.TABLES
    text = "With ScalingNote, queries need numpy alone:" if table else "With ScalingNote:"
    code = [
        "```python",
        "from pathlib import Path",
        "from scalingnote.encode.query_encoder import QueryEncoder",
        "",
        'QueryEncoder.load(Path(PATH)).encode_queries(["how to join two tensors"])',
        "```",
    ]
    documents = [
        "```python",
        "from pathlib import Path",
        "import pyarrow as pa",
        "from scalingnote.encode.encoder import Encoder",
        "from scalingnote.models import native_tower",
        "",
        'encoder = Encoder(native_tower.published(Path(PATH), "document"))',
        'rows = pa.table({"title": ["torch.cat"], "topic": [""], "content": ["joins tensors by an axis"]})',
        'encoder.encode_documents(rows)["summary"]',
        "```",
    ]
    names = {module.name for module in routes["document"]}
    return [text, "\n".join(code), *(["\n".join(documents)] if names <= _READ_BY_US else [])]


def _routes_table(
    folder: Path, routes: Mapping[Role, Sequence[Module]], reference: str | None
) -> Iterator[str]:
    yield "| | queries | documents |"
    yield "|---|---|---|"
    columns = [_described(folder, role, routes[role], reference) for role in ("query", "document")]
    for name, query in columns[0].items():
        yield f"| {name} | {query} | {columns[1][name]} |"


def _described(folder: Path, role: Role, route: Sequence[Module], reference: str | None) -> dict[str, str]:
    """One column of the table of routes."""
    own = [module for module in route if module.folder.is_relative_to(folder) and module.folder != folder]
    size = sum(path.stat().st_size for module in own for path in module.folder.rglob("*") if path.is_file())
    referenced = role == "document" and reference is not None
    prompt = module_list.prompt_of(folder, role)
    return {
        "modules": ", ".join(module.name.rpartition(".")[2] for module in route),
        "size": f"`{reference}`, not copied" if referenced else f"{size / _MEGABYTE:,.1f} MB",
        "tokens read": _tokens_read(route[0].folder),
        "prompt": f"`{prompt}`" if prompt else "none",
    }


def _tokens_read(folder: Path) -> str:
    """How many tokens the first module of a route reads of a text."""
    tower = module_list.read_json(folder / "tower.json") or {}
    truncation = (module_list.read_json(folder / "tokenizer.json") or {}).get("truncation") or {}
    settings = module_list.read_json(folder / "sentence_bert_config.json")
    named = module_list.read_json(folder / "config.json") or {}
    if settings is None:
        limits = [tower.get("max_length"), named.get("max_seq_length"), truncation.get("max_length")]
    else:  # of a transformer, whose tokenizer.json does not limit it
        words = module_list.read_json(folder / "tokenizer_config.json") or {}
        limits = [settings.get("max_seq_length"), words.get("model_max_length")]
    found = next((limit for limit in limits if limit), None)
    return f"{found:,}" if found and found < _NO_LIMIT else "as the model allows"


def _made(facts: CardFacts) -> Iterator[str]:
    yield (
        f"- [ScalingNote](https://arxiv.org/abs/2411.15766) {__version__}: the student learnt to give its "
        "teacher's query embeddings; documents are the teacher's alone."
    )
    if facts.lessons is not None:
        yield f"- Lessons: {facts.lessons:,} texts, each encoded once by the teacher as a query."
    if facts.made:
        yield f"- {facts.made}"
    if facts.datasets:
        yield f"- Drawn from: {', '.join(facts.datasets)}."
