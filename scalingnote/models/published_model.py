"""Modules and prompts of a published embedding model, read without torch.

    modules.json         the modules that every text passes
    router_config.json   the modules of each role, if the first module is a Router

    prefix + text -> the tokenizer with its own post-processor -> transformer -> pooling -> dense, normalise

The files are those of sentence-transformers: modules.json, the folders listed there,
sentence_bert_config.json (lengths, lower case) and config_sentence_transformers.json (prompts). If there is a
Router, the modules of one role are read. A setting that this package does not implement is reported in
`unknown`, and sentence-transformers then runs the model. A missing setting is an error. No weights are read
here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from scalingnote.core.errors import ConfigError
from scalingnote.core.model_files import local_folder, read_json

Role = Literal["query", "document"]
Similarity = Literal["cosine", "dot"]  # computed by search between a query and a document
# Classes of scalingnote.models.library_modules. Published folders contain these names: never change them.
LOOKUP_TABLE = "scalingnote.models.library_modules.LookupTable"
REFERENCED_MODEL = "scalingnote.models.library_modules.ReferencedModel"
TABLES = ("StaticEmbedding", LOOKUP_TABLE)  # first modules that need no transformer
IDENTITY = "torch.nn.modules.linear.Identity"  # activation of a linear Dense module
MODES = {"cls": "cls", "mean": "mean", "last": "lasttoken"}  # our names -> those of sentence-transformers
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # releases before 5.7
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Settings of number formats and batch layout, without effect on embeddings.
_WITHOUT_EFFECT = {
    *("torch_dtype", "dtype", "attn_implementation", "use_safetensors"),
    *("padding_side", "tokenizer_type", "use_fast", "unpad_inputs"),
}
_DEFAULTS = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


@dataclass(frozen=True)
class Module:
    """One module of a folder."""

    type: str  # the dotted path of its class
    folder: Path  # of its config and weights
    kwargs: tuple[str, ...] = ()  # arguments of `encode` that are passed to it

    @property
    def name(self) -> str:
        """The class name of a module of sentence-transformers; the dotted path of any other module."""
        return self.type.rpartition(".")[2] if self.type.startswith("sentence_transformers.") else self.type


def read_modules(folder: Path, role: Role) -> list[Module] | None:
    """Return the modules that texts of `role` pass, in order; None if `folder` has no modules.json.

    Raise ConfigError if a file has another format than sentence-transformers writes, or if a Router has no
    route for `role`.
    """
    entries = read_json(folder / "modules.json")
    if entries is None:
        return None
    modules = [_module(folder, each) for each in entries]
    if modules and modules[0].name in ("Router", "Asym"):
        return [*_route(modules[0].folder, role), *modules[1:]]
    return modules


def role_prompt(folder: Path, role: Role) -> str:
    """Return the prefix of queries or documents: the prompt with the role's name, or "" if there is none.

    `encode_query` and `encode_document` use the same prompts, so that vectors of an existing index match.
    There the library reads neither a default prompt nor one named passage or corpus, because a loaded model
    always has a prompt named document. Raise ConfigError if the default names no prompt.
    """
    settings = model_settings(folder)
    prompts: Mapping[str, str | None] = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name is {default!r}, which is "
            f"not one of its prompts ({', '.join(prompts) or 'it has none'})"
        )
    return prompts.get(role) or ""


def unread_prompt(folder: Path) -> tuple[str, str] | None:
    """Return name and text of a prompt for documents that `encode_document` does not read, or None.

    It is a prompt named passage or corpus, if there is no prompt named document.
    """
    prompts: Mapping[str, str | None] = model_settings(folder).get("prompts") or {}
    candidates = ((name, prompts.get(name)) for name in ("passage", "corpus") if not prompts.get("document"))
    return next(((name, text) for name, text in candidates if text), None)


def similarity_name(folder: Path) -> str:
    """Return the name of a model's own similarity; without one, sentence-transformers uses cosine."""
    return model_settings(folder).get("similarity_fn_name") or "cosine"


def similarity_of(folder: Path) -> Similarity:
    """Return the similarity by which search compares the embeddings of a folder's documents.

    Raise ConfigError like :func:`searched_similarity`.
    """
    modules = read_modules(folder, "document") or []
    is_complete = model_settings(folder).get("truncate_dim") is None
    unit = is_complete and [module.name for module in modules[-1:]] == ["Normalize"]
    return searched_similarity(similarity_name(folder), unit=unit, source=folder)


def searched_similarity(name: str, *, unit: bool, source: Path) -> Similarity:
    """Return the similarity that search computes for a model whose own similarity is `name`.

    Inner products and Euclidean distances of unit vectors rank like cosines. Raise ConfigError for a
    similarity that search does not implement: another one would rank documents differently.
    """
    if name == "cosine" or (unit and name in ("dot", "euclidean")):
        return "cosine"
    if name == "dot":
        return "dot"
    raise ConfigError(
        f"{source} compares embeddings by {name!r} (similarity_fn_name), search by cosine or dot, which rank "
        "documents differently: to search by one of these anyway, set adopt.similarity to it"
    )


def model_settings(folder: Path) -> Mapping[str, Any]:
    """Return the content of config_sentence_transformers.json; empty if there is no such file."""
    return read_json(folder / "config_sentence_transformers.json") or {}


def dense_settings(width: int, dim: int, *, bias: bool = False) -> dict[str, Any]:
    """Return config.json of a Dense module without activation from `width` to `dim` dimensions."""
    return {"in_features": width, "out_features": dim, "bias": bias, "activation_function": IDENTITY}


def _module(folder: Path, entry: Mapping[str, Any]) -> Module:
    try:
        kwargs: Sequence[str] = entry.get("kwargs") or ()
        return Module(entry["type"], _subfolder(folder, entry["path"]), tuple(kwargs))
    except KeyError as error:
        raise ConfigError(f"{folder / 'modules.json'}: a module has no {error}") from None


def _subfolder(folder: Path, name: str) -> Path:
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder / 'modules.json'} names {name!r}, which is outside of this folder")
    return folder / name if name else folder


def _route(place: Path, role: Role) -> list[Module]:
    """Return the modules of a Router's route for `role`, or else of its default route."""
    facts = read_json(place / "router_config.json") or read_json(place / "config.json")
    if facts is None or not {"types", "structure"} <= facts.keys():
        raise ConfigError(
            f"{place} holds a Router without router_config.json: fetch the complete model again"
        )
    structure, parameters = facts["structure"], facts.get("parameters", {})
    route = role if role in structure else parameters.get("default_route")
    mapped = {
        key: name for key, name in (parameters.get("route_mappings") or {}).items() if f"'{role}'" in key
    }
    if mapped or route not in structure:
        raise ConfigError(
            f"{place / 'router_config.json'} has no route named {role!r} (routes: {', '.join(structure)}): "
            "adopt a folder of one role by query_path and path"
        )
    return [Module(facts["types"][name], _subfolder(place, name)) for name in structure[route]]


HeadStep = Path | None  # a module after pooling: the folder of a dense layer, or None for a normalisation


@dataclass(frozen=True)
class PublishedModel:
    """Settings of a published model for one role, query or document."""

    source: Path  # the folder of modules.json, or of a plain Hugging Face model
    folder: Path  # of the transformer and its tokenizer
    pooling: str  # a key of MODES, unless the model has `unknown` settings
    steps: tuple[HeadStep, ...] = ()
    prefix: str = ""
    max_length: int | None = None  # tokens; None: the limit of the tokenizer and the model
    lower_case: bool = False
    truncate_dim: int | None = None  # dimensions kept of an embedding
    similarity: str = "cosine"  # name of the model's own one; for an adopted model a Similarity
    tokenizer_type: str | None = None  # of AutoTokenizer, if the folder names one
    unknown: str | None = None  # names of settings that only sentence-transformers implements

    @property
    def unit(self) -> bool:
        """Whether embeddings are known to have length 1."""
        return self.steps[-1:] == (None,) and self.truncate_dim is None and self.unknown is None


def read(path: str | Path, role: Role, *, pooling: str = "auto") -> PublishedModel:
    """Read the settings of a published model for one role.

    `path` is that of :func:`local_folder`. A `pooling` other than "auto" replaces that of the files; "auto"
    is :func:`usual_pooling` for a model without modules.json.

    Raises:
        ConfigError: there is no such model, no file states its pooling, or a file is invalid.
    """
    folder = local_folder(path)
    modules = read_modules(folder, role)
    if modules is None:
        model = PublishedModel(folder, folder, usual_pooling(folder) if pooling == "auto" else pooling)
    else:
        model = _of_modules(folder, modules, role, pooling)
    if not model.pooling and not model.unknown:
        raise ConfigError(
            f"{folder / 'modules.json'} lists no pooling: set pooling to one of {', '.join(MODES)}"
        )
    return replace(
        model,
        prefix=role_prompt(folder, role),
        truncate_dim=model_settings(folder).get("truncate_dim"),
        similarity=similarity_name(folder),
    )


def usual_pooling(folder: Path) -> str:
    """Return the pooling of a plain transformer, which has no modules.json.

    It is the one of sentence-transformers for such a folder: the last token of a causal model, the only one
    that attends to all others, and the mean of an encoder. If an encoder's config names the pooling of its
    own classifier (as ModernBERT's does), the encoder was trained with that pooling, so it is used. Raise
    ConfigError if the folder holds no config of a transformer, or the config of an encoder-decoder model.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    settings = read_json(folder / "config.json") or {}
    kind = settings.get("model_type")
    if kind is None or settings.get("is_encoder_decoder"):
        raise ConfigError(
            f"{folder} has no modules.json, and its config.json does not state how states are pooled: set "
            f"pooling to one of {', '.join(MODES)}, as its model card states"
        )
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    flag = settings.get("use_bidirectional_attention")
    both_ways = settings.get("is_causal") is False or flag in (True, "all")
    if (decoder or settings.get("is_decoder")) and not both_ways:
        return "last"
    pooling = settings.get("classifier_pooling")
    return pooling if pooling in MODES else "mean"


def _of_modules(folder: Path, modules: Sequence[Module], role: Role, pooling: str) -> PublishedModel:
    unknown: list[str] = []
    first = modules[0].name if modules else "nothing"
    if first == REFERENCED_MODEL:
        model = _referenced_model(modules[0].folder, role, pooling)
    elif first == "Transformer":
        model, unknown = _transformer(PublishedModel(folder, modules[0].folder, ""))
    elif first in TABLES:
        raise ConfigError(
            f"the {role} role of {folder} is a table ({first.rpartition('.')[2]}), not a transformer: "
            "scalingnote.QueryEncoder reads it"
        )
    else:
        raise ConfigError(
            f"{folder / 'modules.json'} begins with {first} for the {role} role: scalingnote reads models "
            "that begin with a Transformer"
        )
    steps, mode = [*model.steps], model.pooling
    for module in modules[1:]:
        settings = read_json(module.folder / "config.json") or {}
        match module.name:
            case "Pooling" if not mode and not steps:
                mode = pooling if pooling != "auto" else _pooling(settings, module.folder)
                if mode not in MODES:
                    unknown.append(f"pooling by {mode}")
                elif not settings.get("include_prompt", True):
                    unknown.append("pooling without the prompt")
            case "Dense" if mode and _reads_the_embedding(settings):
                steps.append(module.folder)
            case "Normalize" if mode and _reads_the_embedding(settings):
                steps.append(None)
            case "Dropout":
                pass  # Dropout has no effect outside of training
            case _:
                unknown.append(module.name)
    return replace(model, pooling=mode, steps=tuple(steps), unknown=", ".join(unknown) or None)


def _referenced_model(place: Path, role: Role, pooling: str) -> PublishedModel:
    """Return the settings of the model that a ReferencedModel module names."""
    settings = read_json(place / "config.json") or {}
    if "model" not in settings:
        raise ConfigError(f"{place / 'config.json'} names no model: fetch the complete model again")
    model = read(local_folder(settings["model"], revision=settings.get("revision")), role, pooling=pooling)
    if model.unknown:
        raise ConfigError(
            f"{model.unknown} of {settings['model']!r} is not supported by scalingnote: read that model "
            "directly"
        )
    return replace(model, max_length=settings.get("max_seq_length") or model.max_length)


def _transformer(model: PublishedModel) -> tuple[PublishedModel, list[str]]:
    """Add lengths and case of a Transformer module; return also the settings that are not supported."""
    folder = model.folder
    files = (read_json(folder / name) for name in _TRANSFORMER_FILES)
    settings: Mapping[str, Any] = next((content for content in files if content is not None), {})
    processor = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    unknown = []
    for name, value in settings.items():
        if name in ("max_seq_length", "do_lower_case", *_WITHOUT_EFFECT) or value in (None, {}):
            continue
        if isinstance(value, Mapping) and name != "modality_config":
            unknown += [f"{name}.{key}" for key in value if key not in _WITHOUT_EFFECT]
        elif name == "modality_config":
            unknown += [] if value.get("text") == _TEXT else [name]
        elif _DEFAULTS.get(name) != value:
            unknown.append(f"{name}={value!r}")
    if (read_json(folder / "config.json") or {}).get("is_encoder_decoder"):
        unknown.append("an encoder of an encoder-decoder model")
    return replace(
        model,
        max_length=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case", False)),
        tokenizer_type=processor.get("tokenizer_type"),
    ), unknown


def _pooling(settings: Mapping[str, Any], place: Path) -> str:
    """Return our name of a Pooling module's mode, or the library's names of an unknown or several modes."""
    value = settings.get("pooling_mode") or [mode for key, mode in _LEGACY_MODES.items() if settings.get(key)]
    modes = [value] if isinstance(value, str) else value
    if not modes:
        raise ConfigError(
            f"{place / 'config.json'} states no pooling: set pooling to one of {', '.join(MODES)}, as its "
            "model card states"
        )
    ours = {theirs: name for name, theirs in MODES.items()}
    return ours.get(modes[0], modes[0]) if len(modes) == 1 else " and ".join(modes)


def _reads_the_embedding(settings: Mapping[str, Any]) -> bool:
    """Return whether a module reads only the sentence embedding and replaces it by its output."""
    name = settings.get("module_input_name", "sentence_embedding")
    same = name == "sentence_embedding" and settings.get("module_output_name") in (None, name)
    return same and not settings.get("use_residual")
