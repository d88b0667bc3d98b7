"""Vectors of real text, a hundred thousand a minute: a passage is the sum of its words' embeddings.

Documents of medquad and python_docs are cut into windows of WORDS words, in their order: by medical focus,
then by module; for more passages, windows overlap by half or three quarters. A passage is the sum of a
pretrained model's token embeddings (MiniLM's input table, pip install 'scalingnote[bench]') weighted by
(1 + log tf) * idf, projected to `dim` principal directions of the first half, at unit length.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from safetensors import torch as safetensors
from scipy import sparse
from tokenizers import Tokenizer

from benchmarks import minilm, public_sets
from scalingnote.datasets.sources import read_texts
from scalingnote.storage.arrow import l2_normalize

WORDS = 16
BLOCK = 20_000  # passages turned into vectors at once


def texts(count: int) -> list[str]:
    """Return distinct passages, at most `count`."""
    passages: dict[str, None] = {}
    documents = [*_texts()]
    for step in (WORDS, WORDS // 2, WORDS // 4):
        passages = dict.fromkeys(_windows(documents, step))
        if len(passages) >= count:
            break
    return [*islice(passages, count)]


def embedded(
    passages: list[str], *, dim: int
) -> tuple[Float[ndarray, "passages dim"], Float[ndarray, "tokens dim"]]:
    """Return unit vectors of the passages, in order, and the rows of the table that are summed in them."""
    path = minilm.path()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    counts = [_term_counts(passages[i : i + BLOCK], tokenizer) for i in range(0, len(passages), BLOCK)]
    frequencies = sum((block > 0).sum(axis=0).A1 for block in counts)
    idf = np.log(len(passages) / np.maximum(frequencies, 1))
    weights = safetensors.load_file(path / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
    table = weights[name].float().numpy()[: len(idf)] * idf[:, None]
    wide = np.concatenate([l2_normalize(np.asarray(block @ table, np.float32)) for block in counts])
    directions = np.linalg.svd(np.cov(wide[: len(wide) // 2].T))[2][:dim]
    return l2_normalize(np.asarray(wide @ directions.T, np.float32)), np.asarray(
        table @ directions.T, np.float32
    )


def _term_counts(texts: Sequence[str], tokenizer: Tokenizer) -> sparse.csr_matrix:
    """Return 1 + log of the count of each token in each text."""
    tokens = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    row = np.repeat(np.arange(len(texts)), [len(ids) for ids in tokens])
    column = np.concatenate([np.array(ids, np.int64) for ids in tokens])
    shape = (len(texts), tokenizer.get_vocab_size())
    counts = sparse.csr_matrix((np.ones(len(row), np.float32), (row, column)), shape=shape)
    counts.sum_duplicates()
    counts.data = 1 + np.log(counts.data)
    return counts


def _windows(documents: Iterable[str], step: int) -> Iterator[str]:
    for text in documents:
        words = text.split()
        for start in range(0, len(words), step):
            yield " ".join(words[start : start + WORDS])


def _texts() -> Iterator[str]:
    yield from public_sets.read_column("medquad", "documents", "content")
    yield from (row["content"] for row in read_texts("python_docs"))
