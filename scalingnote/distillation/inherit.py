"""A student from scratch starts from what its teacher knows of each token: its own table is filled.

Distillation sees the training queries only. Words that stand in none of them, but in many documents, are
known to the teacher; a student with a vocabulary of its own never learns them, and answers the queries of
new topics badly. Its rows for those words come with the teacher's table and hardly move afterwards.

A transformer takes the teacher's token embeddings. The rows of a lookup table are not read by layers, they
are embeddings of queries; there it takes the teacher's answers to every token asked alone.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalingnote.models.lookup import LookupTower


def inherit(table: nn.Embedding, teacher: Float[Tensor, "vocabulary hidden"]) -> None:
    """Fill the first rows of `table` with `teacher`'s, fitted to its width; further rows stay as they are.

    The two vocabularies must number their common tokens alike.
    """
    rows = min(len(teacher), table.num_embeddings)
    with torch.no_grad():
        table.weight[:rows] = fitted(teacher, width=table.embedding_dim)[:rows]


def inherit_rows(student: LookupTower, teacher: Float[Tensor, "vocabulary dim"]) -> None:
    """Fill the first rows of a lookup table with the teacher's embeddings of its tokens, each read alone."""
    rows = min(len(teacher), student.tokens)
    with torch.no_grad():
        student.table[:rows] = teacher[:rows]


def fitted(tokens: Float[Tensor, "vocabulary hidden"], *, width: int) -> Float[Tensor, "vocabulary width"]:
    """`tokens` in `width` dimensions with their inner products kept: exactly, or as well as can be.

    A wider table gets zeros on the right; a narrower one the principal directions of the rows, which no
    other linear map to `width` dimensions beats (Eckart-Young).
    """
    hidden = tokens.shape[1]
    if width >= hidden:
        wider: Tensor = nn.functional.pad(tokens, (0, width - hidden))
        return wider
    _, directions = torch.linalg.eigh((tokens.T @ tokens).double())
    rotated: Tensor = tokens @ directions[:, -width:].flip(1).to(tokens.dtype)
    return rotated
