"""Folders of sentence-transformers, read without torch: their module lists, prompts and lookup tables.

    modules.json         the modules that every text passes
    router_config.json   the modules of each role, if the first module is a Router

A lookup table without attention and features is stored in two modules of sentence-transformers:

    StaticEmbedding   rows x weights - e; tokenizer.json truncates at max_length
    Dense             identity, + e

StaticEmbedding returns the mean of its rows, and 0 for a text without tokens. Weights are multiplied into the
rows: sum(weight x row) / number of tokens has the direction of the weighted mean. `e` is the embedding of a
query without tokens: mean(row - e) + e = mean(row), and 0 + e = e. Rows are float32, since torch would round
sums of float16 rows to float16.

Any other table is the module LookupTable of :mod:`scalingnote.models.library_modules`, whose folder is the
table's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32
from numpy import ndarray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models.lookup_table import Table

Role = Literal["query", "document"]
ROUTERS = ("Router", "Asym")
STATIC_EMBEDDING = "StaticEmbedding"
# Classes of scalingnote.models.library_modules. Published folders contain these names: never change them.
LOOKUP_TABLE = "scalingnote.models.library_modules.LookupTable"
REFERENCED_MODEL = "scalingnote.models.library_modules.ReferencedModel"
TABLES = (STATIC_EMBEDDING, LOOKUP_TABLE)  # first modules that need no transformer


@dataclass(frozen=True)
class Module:
    """One module of a folder."""

    type: str  # the dotted path of its class
    folder: Path  # of its config and weights
    kwargs: tuple[str, ...] = ()  # arguments of `encode` that are passed to it

    @property
    def name(self) -> str:
        """The class name of a module of sentence-transformers; the dotted path of another one."""
        return self.type.rpartition(".")[2] if self.type.startswith("sentence_transformers.") else self.type


def read_modules(folder: Path, role: Role) -> list[Module] | None:
    """Return the modules that texts of `role` pass, in order.

    Args:
        folder: a local folder of a model.
        role: selects the route if the first module is a Router.

    Returns:
        None if `folder` has no modules.json.

    Raises:
        ConfigError: a file is not as sentence-transformers writes it, or the Router has no route for `role`.
    """
    listed = read_json(folder / "modules.json")
    if listed is None:
        return None
    modules = [_module(folder, each) for each in listed]
    if modules and modules[0].name in ROUTERS:
        return [*_route(modules[0].folder, role), *modules[1:]]
    return modules


def role_prompt(folder: Path, role: Role) -> str:
    """Return the prefix of queries or documents; empty if no prompt has the role's name.

    Documents are also named passage or corpus. The default prompt is not used: sentence-transformers does not
    use it in `encode_query` and `encode_document` either. ConfigError if the default names no prompt.
    """
    settings = model_settings(folder)
    prompts: Mapping[str, str | None] = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name is {default!r}, which is "
            f"none of its prompts ({', '.join(prompts) or 'it has none'})"
        )
    names = ("query",) if role == "query" else ("document", "passage", "corpus")
    return next((prompts[name] or "" for name in names if prompts.get(name)), "")


def model_settings(folder: Path) -> Mapping[str, Any]:
    """Return the content of config_sentence_transformers.json; empty if there is no such file."""
    return read_json(folder / "config_sentence_transformers.json") or {}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if there is no such file. ConfigError if it is not JSON."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def _module(folder: Path, listed: Mapping[str, Any]) -> Module:
    try:
        kwargs: Sequence[str] = listed.get("kwargs") or ()
        return Module(listed["type"], _subfolder(folder, listed["path"]), tuple(kwargs))
    except KeyError as error:
        raise ConfigError(f"{folder / 'modules.json'}: a module has no {error}") from None


def _subfolder(folder: Path, name: str) -> Path:
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder / 'modules.json'} names {name!r}, which is outside of its folder")
    return folder / name if name else folder


def _route(place: Path, role: Role) -> list[Module]:
    """Return the modules of a Router's route for `role`; without one, of its default route."""
    facts = read_json(place / "router_config.json") or read_json(place / "config.json")
    if facts is None or not {"types", "structure"} <= facts.keys():
        raise ConfigError(f"{place} holds a Router without router_config.json: fetch the whole model again")
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


_IDENTITY = "torch.nn.modules.linear.Identity"
_NO_TOKEN_LIMIT = 1 << 20  # tokens read of a query if tokenizer.json does not truncate


@dataclass(frozen=True)
class PublishedTable:
    """The lookup table of a folder of sentence-transformers."""

    table: Table
    empty: Float32[ndarray, " dim"]  # embedding of a query without tokens


def is_static(table: Table) -> bool:
    """Return whether StaticEmbedding can represent a table: it has neither attention nor features."""
    return table.attention is None and table.feature_keys is None


def write_table(table: Table, embedding: Path, dense: Path) -> None:
    """Write a table as a StaticEmbedding and a Dense module.

    Args:
        table: one for which :func:`is_static` holds.
        embedding: folder of StaticEmbedding, made here.
        dense: folder of Dense, made here.
    """
    rows = table.rows(slice(table.tokens))
    if table.token_weights is not None:
        rows = rows * table.token_weights[:, np.newaxis]
    empty = table.mean_row()
    embedding.mkdir(parents=True)
    dense.mkdir(parents=True)
    save_file({"embedding.weight": rows - empty}, embedding / "model.safetensors")
    (embedding / "tokenizer.json").write_text(_truncating_tokenizer(table), encoding="utf-8")
    dim = len(empty)
    settings = {"in_features": dim, "out_features": dim, "bias": True, "activation_function": _IDENTITY}
    (dense / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    identity = np.eye(dim, dtype=np.float32)
    save_file({"linear.weight": identity, "linear.bias": empty}, dense / "model.safetensors")


def read_table(folder: Path) -> PublishedTable | None:
    """Return the table that encodes queries in a published folder.

    Args:
        folder: a folder with modules.json, of a Router or of one model for both roles.

    Returns:
        None if queries pass a transformer, or `folder` has no modules.json.

    Raises:
        ConfigError: queries have a prompt, or a module behind the table cannot be part of a table.
        ArtifactError: a file of the table is missing or damaged.
    """
    modules = read_modules(folder, "query")
    if not modules or modules[0].name not in TABLES:
        return None
    if prompt := role_prompt(folder, "query"):
        raise ConfigError(f"{folder} reads queries behind the prompt {prompt!r}, which a table cannot")
    first, layers = modules[0], [module for module in modules[1:] if module.name != "Normalize"]
    if first.name == LOOKUP_TABLE:
        if layers:
            raise ConfigError(f"{folder} has {layers[0].name} behind a LookupTable: write the folder anew")
        table = Table.read(first.folder)
        empty = table.mean_row()
    else:
        table = _read_static(first.folder)
        empty = np.zeros(table.values.shape[1], np.float32)
    if layers:
        rows = np.concatenate([table.rows(), empty[np.newaxis]])
        rows = _apply_linear(rows, layers)
        table, empty = replace(table, values=rows[:-1]), rows[-1]
    keep = model_settings(folder).get("truncate_dim")
    if keep is not None and keep < len(empty):
        if table.attention is not None:
            raise ConfigError(f"{folder}: attention over whole rows cannot be cut to truncate_dim={keep}")
        table, empty = replace(table, values=table.values[:, :keep]), empty[:keep]
    return PublishedTable(table, empty)


def _read_static(folder: Path) -> Table:
    try:
        tensors = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder} is no StaticEmbedding: {error.filename or error} is missing") from None
    except (SafetensorError, TypeError) as error:
        raise ArtifactError(f"{folder / 'model.safetensors'} cannot be read: {error}") from None
    rows = tensors.get("embedding.weight", tensors.get("embeddings"))
    if rows is None or "mapping" in tensors:
        raise ArtifactError(
            f"{folder / 'model.safetensors'} holds {', '.join(tensors)}, not one row for each token: save "
            "the model with sentence-transformers first"
        )
    if "weights" in tensors:
        rows = rows * tensors["weights"][:, np.newaxis]
    longest = (tokenizer.truncation or {}).get("max_length", _NO_TOKEN_LIMIT)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Table(rows, tokenizer.to_str(), longest)


def _apply_linear(
    rows: Float32[ndarray, "rows dim"], layers: Sequence[Module]
) -> Float32[ndarray, "rows out"]:
    """Apply linear layers to rows. The mean of the results is the layers' output for the mean of the rows."""
    for layer in layers:
        settings = read_json(layer.folder / "config.json") or {}
        if (
            layer.name != "Dense"
            or settings.get("activation_function") != _IDENTITY
            or "use_residual" in settings
        ):
            raise ConfigError(
                f"{layer.folder}: {layer.name} is not linear, so it cannot be worked into the table's rows"
            )
        tensors = load_file(layer.folder / "model.safetensors")
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias", np.float32(0))
        identity = weight.shape[0] == weight.shape[1] and np.array_equal(weight, np.eye(len(weight)))
        rows = (rows if identity else rows @ weight.T) + bias
    return rows


def _truncating_tokenizer(table: Table) -> str:
    """Return the table's tokenizer, with truncation at `max_length` tokens, as JSON."""
    tokenizer = Tokenizer.from_str(table.tokenizer_json)
    tokenizer.no_padding()
    tokenizer.enable_truncation(table.max_length)
    return tokenizer.to_str()
