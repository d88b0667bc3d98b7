"""Embeddings without a training: titles as sums of a pretrained model's rows of tokens, in seconds.

Rows are MiniLM's input embeddings times idf, brought to DIM by the principal directions of the titles'
embeddings; a title is the sum of its tokens' rows by 1 + log tf, at unit length.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors import torch as safetensors
from scipy import sparse
from tokenizers import Tokenizer

from benchmarks import minilm
from scalingnote.config import Config
from scalingnote.models import lookup
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft

DIM = 128


class Plain(Config):
    """What the artifacts of the plain embedding were made by."""

    dim: int = DIM


def build(dataset: Artifact, folder: str) -> tuple[Artifact, Artifact]:
    """A lookup query tower, and the embeddings of a dataset's titles."""
    parts = dataset.names("documents/", ".parquet")
    path = minilm.path()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    titles = {part: dataset.table(part, ["title"])["title"].to_pylist() for part in parts}
    counts = {part: term_counts(found, tokenizer) for part, found in titles.items()}
    whole = sparse.vstack(list(counts.values())).tocsr()
    idf = np.log(whole.shape[0] / np.maximum((whole > 0).sum(axis=0).A1, 1))
    weights = safetensors.load_file(path / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
    wide = weights[name].float().numpy()[: len(idf)] * idf[:, None]
    matrix = arrow.l2_normalize(np.asarray(whole @ wide, np.float32))
    directions = np.linalg.svd(np.cov(matrix.T))[2][:DIM]
    rows = np.ascontiguousarray(wide @ directions.T, np.float32)

    parents = {"dataset": dataset}
    draft = Draft(f"{folder}/dual_encoder", kind="dual_encoder", config=Plain(), parents=parents)
    if not draft.finished:
        table = lookup.from_table(rows, tokenizer, max_length=32, storage="float32")
        table.save(Path(draft.path("query")))
    towers = draft.existing() if draft.finished else draft.commit(counts={"tokens": len(rows)})
    parents |= {"dual_encoder": towers}
    draft = Draft(f"{folder}/embeddings", kind="embeddings", config=Plain(), parents=parents)
    if draft.finished:
        return towers, draft.existing()
    for part, found in counts.items():
        embedded = arrow.l2_normalize(np.asarray(found @ rows, np.float32))
        columns = {"doc_id": dataset.table(part, ["doc_id"])["doc_id"], "summary": arrow.to_arrow(embedded)}
        draft.write_table(part.replace("documents/", "embeddings/", 1), pa.table(columns))
    return towers, draft.commit(counts={"documents": whole.shape[0]})


def term_counts(texts: Sequence[str], tokenizer: Tokenizer) -> sparse.csr_matrix:
    """1 + log of how often each text has each token."""
    tokens = [found.ids for found in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    row = np.repeat(np.arange(len(texts)), [len(ids) for ids in tokens])
    column = np.concatenate([np.array(ids, np.int64) for ids in tokens])
    shape = (len(texts), tokenizer.get_vocab_size())
    counts = sparse.csr_matrix((np.ones(len(row), np.float32), (row, column)), shape=shape)
    counts.sum_duplicates()
    counts.data = 1 + np.log(counts.data)
    return counts
