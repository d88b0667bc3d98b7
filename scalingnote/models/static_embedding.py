"""Lookup tables as modules of sentence-transformers, written and read. numpy and safetensors, no torch.

    StaticEmbedding   rows x weights - e; tokenizer.json cuts at max_length
    Dense             identity, + e

StaticEmbedding gives the mean of its rows, and 0 for a text without tokens. Weights are multiplied into the
rows: sum of weight x row over the number of tokens has the direction of the weighted mean. `e` is the
embedding of a query without tokens: mean(row - e) + e = mean(row), and 0 + e = e. Rows are float32, since
torch would round the sums of float16 rows to float16.

A table with attention, or with rows for pairs and end tokens, is the module LookupTable of
:mod:`scalingnote.models.library_modules`, whose folder is the table's own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from numpy import ndarray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import module_list
from scalingnote.models.module_list import LOOKUP_TABLE, TABLES, Module
from scalingnote.models.table import Table

_IDENTITY = "torch.nn.modules.linear.Identity"
_UNBOUNDED = 1 << 20  # tokens read of a query where tokenizer.json does not cut


@dataclass(frozen=True)
class PublishedTable:
    """The table of a folder that sentence-transformers reads."""

    table: Table
    empty: Float32[ndarray, " dim"]  # embedding of a query without tokens


def is_static(table: Table) -> bool:
    """Whether StaticEmbedding can hold a table: without attention, pairs and end tokens."""
    return table.attention is None and table.feature_keys is None


def write(table: Table, embedding: Path, dense: Path) -> None:
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
    (embedding / "tokenizer.json").write_text(_cutting(table), encoding="utf-8")
    dim = len(empty)
    settings = {"in_features": dim, "out_features": dim, "bias": True, "activation_function": _IDENTITY}
    (dense / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    identity = np.eye(dim, dtype=np.float32)
    save_file({"linear.weight": identity, "linear.bias": empty}, dense / "model.safetensors")


def read(folder: Path) -> PublishedTable | None:
    """The table through which a published folder reads queries.

    Args:
        folder: a folder with modules.json, of a Router or of one model for both roles.

    Returns:
        None where queries pass a transformer, or where `folder` has no modules.json.

    Raises:
        ConfigError: queries have a prompt, or a module behind the table cannot be part of a table.
        ArtifactError: a file of the table is missing or damaged.
    """
    modules = module_list.read(folder, "query")
    if not modules or modules[0].name not in TABLES:
        return None
    if prompt := module_list.prompt_of(folder, "query"):
        raise ConfigError(f"{folder} reads queries behind the prompt {prompt!r}, which a table cannot")
    first, layers = modules[0], [module for module in modules[1:] if module.name != "Normalize"]
    if first.name == LOOKUP_TABLE:
        if layers:
            raise ConfigError(f"{folder} has {layers[0].name} behind a LookupTable: write the folder anew")
        table = Table.read(first.folder)
        empty = table.mean_row()
    else:
        table = _static(first.folder)
        empty = np.zeros(table.values.shape[1], np.float32)
    if layers:
        rows = np.concatenate([table.rows(), empty[np.newaxis]])
        rows = _through(rows, layers)
        table, empty = replace(table, values=rows[:-1]), rows[-1]
    keep = module_list.settings_of(folder).get("truncate_dim")
    if keep is not None and keep < len(empty):
        if table.attention is not None:
            raise ConfigError(f"{folder}: attention over whole rows cannot be cut to truncate_dim={keep}")
        table, empty = replace(table, values=table.values[:, :keep]), empty[:keep]
    return PublishedTable(table, empty)


def _static(folder: Path) -> Table:
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
    longest = (tokenizer.truncation or {}).get("max_length", _UNBOUNDED)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Table(rows, tokenizer.to_str(), longest)


def _through(rows: Float32[ndarray, "rows dim"], layers: Sequence[Module]) -> Float32[ndarray, "rows out"]:
    """Rows behind linear layers: the mean of these is the layers' output for the mean of the rows."""
    for layer in layers:
        settings = module_list.read_json(layer.folder / "config.json") or {}
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


def _cutting(table: Table) -> str:
    """The table's tokenizer with truncation at `max_length` tokens."""
    tokenizer = Tokenizer.from_str(table.tokenizer_json)
    tokenizer.no_padding()
    tokenizer.enable_truncation(table.max_length)
    return tokenizer.to_str()
