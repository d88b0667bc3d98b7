"""A lookup tower on disk: one array of rows and what goes with it. Reading takes numpy alone.

    tower.json      what it is: dim, tokens, storage, weighting, what it was made from
    tokenizer.json  text -> token numbers, which are row numbers
    table.npy       [tokens + features, dim], memory-mapped; int8 goes with
    scales.npy      [tokens + features], what a row's integers are multiplied by
    token_weights.npy  [tokens + features], only where they were learnt
    feature_keys.npy  [features], only where pairs of tokens or end tokens have rows (lookup_features.py)
    attention.npy   [2, dim, dim], only where rows attend to each other: the matrices of scores and of outputs

A query's embedding is (sum of weight x row over its tokens and features) / sum of weights; that of a query
without tokens is the mean of the tokens' rows.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int, Int64, Shaped
from numpy import ndarray

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models.lookup_features import LookupFeatures

Storage = Literal["float32", "float16", "int8"]


@dataclass(frozen=True)
class Table:
    """Rows as they are stored, and what goes with them."""

    values: Shaped[ndarray, "rows dim"]
    tokenizer_json: str
    max_length: int
    scales: Float32[ndarray, " rows"] | None = None
    token_weights: Float32[ndarray, " rows"] | None = None
    attention: Float32[ndarray, "2 dim dim"] | None = None
    feature_keys: Int64[ndarray, " features"] | None = None
    made_from: Mapping[str, str] = field(default_factory=dict)
    """Digests of what the rows depend on (weights, adapter, instruction...), the tokenizer aside."""

    @property
    def tokens(self) -> int:
        """How many tokens there are; each has a row."""
        return len(self.values) - (0 if self.feature_keys is None else len(self.feature_keys))

    @property
    def features(self) -> LookupFeatures | None:
        """Pairs of tokens and end tokens that have rows behind those of the tokens; None: there are none."""
        return None if self.feature_keys is None else LookupFeatures(self.feature_keys, tokens=self.tokens)

    def mean_row(self) -> Float32[ndarray, " dim"]:
        """The embedding of a query without tokens. It reads all rows of tokens."""
        mean: ndarray = self.rows(slice(self.tokens)).mean(axis=0)
        return mean

    def rows(self, numbers: Int[ndarray, "..."] | slice = slice(None)) -> Float32[ndarray, "... dim"]:
        """Some rows, in float32."""
        return restored(self.values[numbers], None if self.scales is None else self.scales[numbers])

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
                (folder / f"{name}.npy").write_bytes(npy_bytes(array))
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
        (folder / "tower.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Table":
        """The table of a folder, its rows memory-mapped. ArtifactError when it holds none, or another's."""
        try:
            facts: dict[str, Any] = json.loads((folder / "tower.json").read_text())
            if facts.get("kind") != "lookup":
                raise ArtifactError(f"{folder} is no lookup tower but a {facts.get('kind', 'transformer')}")
            tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
            values = np.load(folder / "table.npy", mmap_mode="r", allow_pickle=False)
            optional = {
                name: np.load(folder / f"{name}.npy", allow_pickle=False)
                for name, there in (
                    ("scales", facts["storage"] == "int8"),
                    ("token_weights", facts["weighting"] == "learned"),
                    ("attention", facts["attention"]),
                    ("feature_keys", facts.get("features")),
                )
                if there
            }
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} is not a lookup tower: {error.filename} is missing") from None
        except KeyError as error:
            raise ArtifactError(
                f"{folder}/tower.json does not say {error}: another version wrote it, make the tower anew"
            ) from None
        rows = facts["tokens"] + facts.get("features", 0)
        if len(values) != rows:
            raise ArtifactError(
                f"{folder}/table.npy has {len(values):,} rows for {rows:,} tokens and features: "
                "another version wrote it, make the tower anew"
            )
        if _sha256(tokenizer.encode()) != facts["digest_of"]["tokenizer"]:
            raise ArtifactError(f"{folder}: tokenizer.json is not the one the table was made for: restore it")
        return cls(
            values,
            tokenizer,
            facts["max_length"],
            made_from={name: value for name, value in facts["digest_of"].items() if name != "tokenizer"},
            **optional,
        )


def stored(
    rows: Float[ndarray, "rows dim"], storage: Storage
) -> tuple[Shaped[ndarray, "rows dim"], Float32[ndarray, " rows"] | None]:
    """Rows as they go to disk, and the scale of each where they are integers.

    int8: a row's largest value becomes 127, so that no value is off by more than half a scale.
    ConfigError where float16 would make infinities of finite values.
    """
    largest, most = np.abs(rows).max(initial=0.0), float(np.finfo(np.float16).max)
    if storage == "float16" and most < largest < np.inf:
        raise ConfigError(
            f"rows of the lookup table reach {largest:.3g}, float16 holds {most:.0f}: set storage to float32 "
            "where the tower is configured (train.query.storage, distill.student.storage)"
        )
    if storage != "int8":
        return np.ascontiguousarray(rows, dtype=storage), None
    scales = (np.abs(rows).max(axis=1, initial=0.0) / 127).astype(np.float32)
    values = np.rint(rows / np.where(scales > 0, scales, 1)[:, None])
    return values.clip(-127, 127).astype(np.int8), scales


def restored(
    values: Shaped[ndarray, "... dim"], scales: Float32[ndarray, "..."] | None
) -> Float32[ndarray, "... dim"]:
    """What :func:`stored` made, as float32 again."""
    rows = np.asarray(values, dtype=np.float32)
    return rows if scales is None else rows * scales[..., None]


def npy_bytes(array: ndarray) -> bytes:
    """An array as the content of a .npy file; equal arrays give equal bytes."""
    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(array), allow_pickle=False)
    return out.getvalue()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
