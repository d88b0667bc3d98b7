"""Lookup tables on disk, their rows for token features, and their published form, without torch.

    tower.json         settings: dim, tokens, storage, weighting, digests of what the rows were computed from
    tokenizer.json     text -> token ids, which are row numbers
    table.npy          [tokens + features, dim], memory-mapped
    scales.npy         [tokens + features], of int8 storage: the factor of each row
    token_weights.npy  [tokens + features], if weights were learnt
    feature_keys.npy   [features], if token pairs or end tokens have rows
    attention.npy      [2, dim, dim], if rows attend to each other: the score and the output matrix

The embedding of a query is sum(weight x row) / sum(weight) over its tokens and features. The embedding of a
query without tokens is the mean of the token rows.

A mean of token rows contains neither word order nor position. Features add both, for example rows for "how
to", or for "who" as the first token, at the cost of a few more rows per query. Only features that occur in
the training texts have rows, so a new pair changes nothing.

A table without attention and features is published as two modules of sentence-transformers:

    StaticEmbedding   rows x weights - e; tokenizer.json truncates at max_length
    Dense             identity, + e

StaticEmbedding returns the mean of its rows, and 0 for a text without tokens. Weights are multiplied into the
rows: sum(weight x row) / number of tokens has the direction of the weighted mean. `e` is the embedding of a
query without tokens: mean(row - e) + e = mean(row), and 0 + e = e. Rows are float32, because torch would
round sums of float16 rows to float16. Any other table is published as the module LookupTable of
:mod:`scalingnote.models.library_modules`, in the table's own folder format.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy import ndarray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from scalingnote.core.array_types import Float, Float32, Int, Int64, Shaped
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.model_files import read_json, write_json
from scalingnote.models.prompt import without_limits
from scalingnote.models.published_model import (
    IDENTITY,
    LOOKUP_TABLE,
    TABLES,
    Module,
    dense_settings,
    model_settings,
    read_modules,
    role_prompt,
)

MIN_FEATURE_TEXTS = 2  # training texts that a feature must occur in
FREQUENCY_SMOOTHING = 3e-4  # share of all tokens at which a start weight is one half (Arora et al. 2017, SIF)
FEATURE_WEIGHT = 0.5  # start weight of features and of new words


class LookupFeatures:
    """Token pairs and end tokens that have rows, in the order of their rows."""

    ENDS = 4  # maximum end tokens of a query: first, second, last but one and last

    def __init__(self, keys: Int64[ndarray, " features"], *, tokens: int) -> None:
        """Index `keys` of :func:`frequent_features`; row `tokens + i` of the table is that of ``keys[i]``."""
        self.keys, self.tokens = keys, tokens
        self._rows = {key: tokens + row for row, key in enumerate(keys.tolist())}
        self.are_bigrams: ndarray = keys < tokens * tokens  # the others are end tokens
        # A kind of feature without rows is not looked up.
        self._bigrams, self._ends = bool(self.are_bigrams.any()), not self.are_bigrams.all()

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, ids: Sequence[int]) -> list[int]:
        """Return token ids followed by the row numbers of their features."""
        rows, tokens = self._rows, self.tokens
        keys = [first * tokens + second for first, second in pairwise(ids)] if self._bigrams else []
        if self._ends:
            keys += _end_keys(ids, tokens)
        return [*ids, *[rows[key] for key in keys if key in rows]]  # a generator takes longer


def frequent_features(
    texts: Iterable[Sequence[int]], *, tokens: int, bigrams: int, ends: bool
) -> Int64[ndarray, " features"]:
    """Return the keys of features in at least :data:`MIN_FEATURE_TEXTS` texts, most frequent first.

    `texts` are token ids, `tokens` the size of the vocabulary, `bigrams` the largest number of pairs.
    """
    pairs: Counter[int] = Counter()
    at_ends: Counter[int] = Counter()
    for ids in texts:
        if bigrams:
            pairs.update({first * tokens + second for first, second in pairwise(ids)})
        if ends:
            at_ends.update(set(_end_keys(ids, tokens)))
    return np.array([*_most_frequent(pairs)[:bigrams], *_most_frequent(at_ends)], np.int64)


def start_weights(counts: Int64[ndarray, " tokens"], features: LookupFeatures) -> Float32[ndarray, " rows"]:
    """Return the start weights of rows: smoothed inverse frequencies of tokens, then FEATURE_WEIGHT.

    `counts` are the occurrences of each token in the training texts.
    """
    weights = FREQUENCY_SMOOTHING / (FREQUENCY_SMOOTHING + counts / max(int(counts.sum()), 1))
    return np.concatenate([weights, np.full(len(features), FEATURE_WEIGHT)]).astype(np.float32)


def _end_keys(ids: Sequence[int], tokens: int) -> list[int]:
    """Return the keys of end tokens, which are larger than those of all pairs.

    They are the first and last token, and with two or more tokens also the second and the last but one.
    """
    if not ids:
        return []
    base = tokens * tokens
    keys = [base + ids[0], base + tokens + ids[-1]]
    if len(ids) > 1:
        keys += [base + 2 * tokens + ids[1], base + 3 * tokens + ids[-2]]
    return keys


def _most_frequent(counts: Counter[int]) -> list[int]:
    """Sort keys by falling count, then by key, so that the order does not depend on the input order."""
    frequent = [(-count, key) for key, count in counts.items() if count >= MIN_FEATURE_TEXTS]
    return [key for _, key in sorted(frequent)]


Storage = Literal["float32", "float16", "int8"]


@dataclass(frozen=True)
class Table:
    """The content of a lookup tower's folder."""

    values: Shaped[ndarray, "rows dim"]
    tokenizer_json: str
    max_length: int
    scales: Float32[ndarray, " rows"] | None = None
    token_weights: Float32[ndarray, " rows"] | None = None
    attention: Float32[ndarray, "2 dim dim"] | None = None
    feature_keys: Int64[ndarray, " features"] | None = None
    made_from: Mapping[str, str] = field(default_factory=dict)
    """Digests of the inputs of the rows (weights, adapter, instruction...), without the tokenizer."""
    empty: Float32[ndarray, " dim"] | None = None
    """Embedding of a query without tokens, if a published table states one; None: :meth:`mean_row`."""

    @property
    def tokens(self) -> int:
        """Number of tokens; each has a row."""
        return len(self.values) - (0 if self.feature_keys is None else len(self.feature_keys))

    @property
    def features(self) -> LookupFeatures | None:
        """Features with rows after those of the tokens; None: there are none."""
        return None if self.feature_keys is None else LookupFeatures(self.feature_keys, tokens=self.tokens)

    def mean_row(self) -> Float32[ndarray, " dim"]:
        """Return the mean of the rows of tokens; all of them are read."""
        mean: ndarray = self.rows(slice(self.tokens)).mean(axis=0)
        return mean

    def rows(self, numbers: Int[ndarray, "..."] | slice = slice(None)) -> Float32[ndarray, "... dim"]:
        """Return rows in float32."""
        return dequantize_rows(self.values[numbers], None if self.scales is None else self.scales[numbers])

    def write(self, folder: Path) -> None:
        """Write the folder; equal tables give equal bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            "table": self.values,
            "scales": self.scales,
            "token_weights": self.token_weights,
            "attention": self.attention,
            "feature_keys": self.feature_keys,
        }
        for name, array in arrays.items():
            if array is not None:
                np.save(folder / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
        (folder / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")
        facts = {
            "kind": "lookup",
            "role": "query",
            "dim": self.values.shape[1],
            "views": ["query"],
            "max_length": self.max_length,
            "tokens": self.tokens,
            "storage": str(self.values.dtype),
            "weighting": "mean" if self.token_weights is None else "learned",
            "attention": self.attention is not None,
            "features": 0 if self.feature_keys is None else len(self.feature_keys),
            "digest_of": {"tokenizer": _sha256(self.tokenizer_json.encode()), **self.made_from},
        }
        write_json(folder / "tower.json", facts)

    @classmethod
    def read(cls, folder: Path) -> "Table":
        """Read a folder, its rows memory-mapped.

        Raise ArtifactError if it holds no table, or a table that does not match its other files.
        """
        try:
            facts: dict[str, Any] = json.loads((folder / "tower.json").read_text())
            if facts.get("kind") != "lookup":
                raise ArtifactError(
                    f"{folder} is not a lookup tower but a {facts.get('kind', 'transformer')}"
                )
            tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
            values = np.load(folder / "table.npy", mmap_mode="r", allow_pickle=False)
            optional = {
                name: np.load(folder / f"{name}.npy", allow_pickle=False)
                for name, exists in (
                    ("scales", facts["storage"] == "int8"),
                    ("token_weights", facts["weighting"] == "learned"),
                    ("attention", facts["attention"]),
                    ("feature_keys", facts.get("features")),
                )
                if exists
            }
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} is not a lookup tower: {error.filename} is missing") from None
        except KeyError as error:
            raise ArtifactError(
                f"{folder}/tower.json lacks {error}: another version wrote it, make the tower again"
            ) from None
        rows = facts["tokens"] + facts.get("features", 0)
        if len(values) != rows:
            raise ArtifactError(
                f"{folder}/table.npy has {len(values):,} rows for {rows:,} tokens and features: "
                "another version wrote it, make the tower again"
            )
        if _sha256(tokenizer.encode()) != facts["digest_of"]["tokenizer"]:
            raise ArtifactError(f"{folder}: the table was made for another tokenizer.json: restore that file")
        return cls(
            values,
            tokenizer,
            facts["max_length"],
            made_from={name: value for name, value in facts["digest_of"].items() if name != "tokenizer"},
            **optional,
        )


def quantize_rows(
    rows: Float[ndarray, "rows dim"], storage: Storage
) -> tuple[Shaped[ndarray, "rows dim"], Float32[ndarray, " rows"] | None]:
    """Convert rows to the number format in which they are stored; return them and the scales of int8 rows.

    int8 scales a row so that its largest magnitude is 127: the error of a value is at most half a scale.
    Raise ConfigError if a finite value is too large for float16.
    """
    largest, limit = np.abs(rows).max(initial=0.0), float(np.finfo(np.float16).max)
    if storage == "float16" and limit < largest < np.inf:
        raise ConfigError(
            f"rows of the lookup table reach {largest:.3g}, float16 holds {limit:.0f}: set storage to "
            "float32 where the tower is configured (train.query.storage, distill.student.storage)"
        )
    if storage != "int8":
        return np.ascontiguousarray(rows, dtype=storage), None
    scales = (np.abs(rows).max(axis=1, initial=0.0) / 127).astype(np.float32)
    values = np.rint(rows / np.where(scales > 0, scales, 1)[:, None])
    return values.clip(-127, 127).astype(np.int8), scales


def dequantize_rows(
    values: Shaped[ndarray, "... dim"], scales: Float32[ndarray, "..."] | None
) -> Float32[ndarray, "... dim"]:
    """Convert the result of :func:`quantize_rows` to float32."""
    rows = np.asarray(values, dtype=np.float32)
    return rows if scales is None else rows * scales[..., None]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_NO_TOKEN_LIMIT = 1 << 20  # maximum tokens of a query if tokenizer.json does not truncate


def is_static(table: Table) -> bool:
    """Return whether StaticEmbedding can represent a table: it has neither attention nor features."""
    return table.attention is None and table.feature_keys is None


def write_published(table: Table, embedding: Path, dense: Path) -> None:
    """Write a table for which :func:`is_static` is true as StaticEmbedding and Dense, in two new folders."""
    rows = table.rows(slice(table.tokens))
    if table.token_weights is not None:
        rows = rows * table.token_weights[:, np.newaxis]
    empty = table.mean_row()
    embedding.mkdir(parents=True)
    dense.mkdir(parents=True)
    save_file({"embedding.weight": rows - empty}, embedding / "model.safetensors")
    tokenizer = without_limits(Tokenizer.from_str(table.tokenizer_json))
    tokenizer.enable_truncation(table.max_length)
    (embedding / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    dim = len(empty)
    write_json(dense / "config.json", dense_settings(dim, dim, bias=True))
    identity = np.eye(dim, dtype=np.float32)
    save_file({"linear.weight": identity, "linear.bias": empty}, dense / "model.safetensors")


def read_table(folder: Path) -> Table:
    """Return the table of a tower's folder, or the one that encodes queries in a published folder.

    Raise the errors of :meth:`Table.read` and :func:`read_published`.
    """
    published = None if (folder / "tower.json").exists() else read_published(folder)
    return published or Table.read(folder)


def read_published(folder: Path) -> Table | None:
    """Return the table that encodes queries in a published folder.

    `folder` is that of a Router, or of one model for both roles. The result is None if queries pass a
    transformer, or if there is no modules.json.

    Raises:
        ConfigError: queries have a prompt, or a module after the table cannot be part of a table.
        ArtifactError: a file of the table is missing or damaged.
    """
    modules = read_modules(folder, "query")
    if not modules or modules[0].name not in TABLES:
        return None
    if prompt := role_prompt(folder, "query"):
        raise ConfigError(
            f"{folder} reads queries after the prompt {prompt!r}, but a table reads no prompt: use "
            "sentence-transformers"
        )
    first, layers = modules[0], [module for module in modules[1:] if module.name != "Normalize"]
    if first.name == LOOKUP_TABLE:
        if layers:
            raise ConfigError(f"{folder} has {layers[0].name} after a LookupTable: write the folder again")
        table = Table.read(first.folder)
    else:
        table = _read_static(first.folder)
    if layers:
        assert table.empty is not None  # only a StaticEmbedding has layers after it
        rows = _apply_linear(np.concatenate([table.rows(), table.empty[np.newaxis]]), layers)
        table = replace(table, values=rows[:-1], empty=rows[-1])
    keep = model_settings(folder).get("truncate_dim")
    if keep is not None and keep < table.values.shape[1]:
        if table.attention is not None:
            raise ConfigError(
                f"{folder}: rows with attention cannot be cut to truncate_dim={keep}: remove truncate_dim"
            )
        empty = None if table.empty is None else table.empty[:keep]
        table = replace(table, values=table.values[:, :keep], empty=empty)
    return table


def _read_static(folder: Path) -> Table:
    try:
        tensors = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} is not a StaticEmbedding: {error.filename or error} is missing"
        ) from None
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
    empty = np.zeros(rows.shape[1], np.float32)  # as in StaticEmbedding
    return Table(rows, without_limits(tokenizer).to_str(), longest, empty=empty)


def _apply_linear(
    rows: Float32[ndarray, "rows dim"], layers: Sequence[Module]
) -> Float32[ndarray, "rows out"]:
    """Apply linear layers to rows. The mean of the results is the layers' output for the mean of the rows."""
    for layer in layers:
        settings = read_json(layer.folder / "config.json") or {}
        if (
            layer.name != "Dense"
            or settings.get("activation_function") != IDENTITY
            or "use_residual" in settings
        ):
            raise ConfigError(
                f"{layer.folder}: {layer.name} is not linear, so it cannot be applied to the table's rows"
            )
        tensors = load_file(layer.folder / "model.safetensors")
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias", np.float32(0))
        identity = weight.shape[0] == weight.shape[1] and np.array_equal(weight, np.eye(len(weight)))
        rows = (rows if identity else rows @ weight.T) + bias
    return rows
