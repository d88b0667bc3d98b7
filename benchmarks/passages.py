"""Vectors of real text, by the hundred thousand in a minute: passages, each the sum of its words' embeddings.

Documents of medquad and python_docs are cut into windows of WORDS words, in the order in which they come: by
medical focus, then by module. A passage is the sum of a pretrained model's token embeddings (MiniLM's input
table, pip install 'scalingnote[bench]') by (1 + log tf) * idf, brought to `dim` by the principal directions
of the first half, at unit length.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from safetensors import torch as safetensors
from tokenizers import Tokenizer

from benchmarks import minilm
from benchmarks.plain_embeddings import term_counts
from scalingnote.datasets import sources
from scalingnote.datasets.config import MedQuad, PythonDocs
from scalingnote.datasets.raw_rows import UnreadableRow
from scalingnote.storage.arrow import l2_normalize

WORDS = 16
BLOCK = 20_000  # passages turned into vectors at once
SOURCES = (MedQuad(), PythonDocs())


def texts(count: int) -> list[str]:
    """Distinct passages, at most `count`."""
    found: dict[str, None] = {}
    for passage in _windows():
        found.setdefault(passage)
        if len(found) == count:
            break
    return list(found)


def vectors(passages: list[str], *, dim: int) -> Float[ndarray, "passages dim"]:
    """Unit vectors of the passages, in order."""
    return embedded(passages, dim=dim)[0]


def embedded(
    passages: list[str], *, dim: int
) -> tuple[Float[ndarray, "passages dim"], Float[ndarray, "tokens dim"]]:
    """Unit vectors of the passages, in order, and the rows of the table that they are sums of."""
    path = minilm.path()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    counts = [term_counts(passages[i : i + BLOCK], tokenizer) for i in range(0, len(passages), BLOCK)]
    seen = sum((block > 0).sum(axis=0).A1 for block in counts)
    idf = np.log(len(passages) / np.maximum(seen, 1))
    weights = safetensors.load_file(path / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
    table = weights[name].float().numpy()[: len(idf)] * idf[:, None]
    wide = np.concatenate([l2_normalize(np.asarray(block @ table, np.float32)) for block in counts])
    directions = np.linalg.svd(np.cov(wide[: len(wide) // 2].T))[2][:dim]
    return l2_normalize(np.asarray(wide @ directions.T, np.float32)), np.asarray(
        table @ directions.T, np.float32
    )


def _windows() -> Iterator[str]:
    for source in SOURCES:
        for row in sources.read(source).documents:
            words = [] if isinstance(row, UnreadableRow) else str(row["content"]).split()
            for start in range(0, len(words), WORDS):
                yield " ".join(words[start : start + WORDS])
