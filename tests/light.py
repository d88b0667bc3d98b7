"""A tiny LightRetriever and its batches, for the tests of its training."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

import tiny
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import Lora, TokenWiseConfig, TowerConfig
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.train.config import Losses, Sparse
from scalingnote.train.objective import StageOne, Triplets, pad_lists

DIM = 16
STEPS = 10  # of a run
LOSSES = Losses(temperature=0.1, bidirectional=False, alpha=0, matryoshka=(4, DIM))
SPARSE = Sparse(flops=1e-2)


@cache
def learnt() -> str:
    texts = [text for row in tiny.document_rows() for text in (row["title"], row["content"])]
    return backbone.train_tokenizer(texts, vocabulary=400)


def document_tower(**more) -> TowerConfig:
    return TowerConfig(
        backbone=tiny.CAUSAL, max_length=40, prompt="{title} {topic}: {content}[EOS][EMB]", **more
    )


def stage(
    *,
    shared: bool = True,
    lora: Lora | None = None,
    sparse: Sparse | None = SPARSE,
    align: bool = True,
    losses: Losses = LOSSES,
) -> StageOne:
    """Build all that LightRetriever trains, from scratch."""
    towers = dual_encoder.build(
        TokenWiseConfig(backbone=tiny.CAUSAL, lora=lora, max_length=16, instruction="find: "),
        document_tower(lora=lora),
        dim=DIM,
        tokenizers={"query": learnt(), "document": learnt()},
        seed=0,
        share_backbone=shared,
        sparse=sparse is not None,
    )
    towers.sparse_query = SparseQuery(towers.document.prompt.tokenizer, max_length=16, weighting="counts")
    return StageOne(towers, losses, sparse=sparse, align=align)


def triplets(
    made: StageOne, rows: Sequence[int], *, of: int, packed: bool = False, step: float = STEPS
) -> Triplets:
    """Build some rows of a global batch of `of` rows, with one hard negative each; ids repeat."""
    texts = tiny.document_rows(2 * of)
    documents = [texts[i] for i in (*rows, *(row + of for row in rows))]
    columns = ([document[name] for document in documents] for name in ("title", "topic", "content"))
    queries = [f"{texts[i]['content'][:20]} {texts[i]['title']}" for i in rows]
    row_numbers, towers = torch.tensor(rows), made.towers
    sparse = SparseQuery(towers.document.prompt.tokenizer, max_length=16, weighting="counts")
    terms = [np.array(ids) for ids in sparse.tokens(queries)]
    ids = row_numbers % max(of - 3, 1)
    return Triplets(
        queries=collate(towers.query.prompt.rows(queries), pad=0, packed=packed),
        documents=collate(towers.document.prompt.rows(*columns), pad=0, packed=packed),
        query_ids=ids,
        document_ids=torch.cat([ids, row_numbers + 1000]),
        known_positives=torch.stack([ids, (ids + 5) % 17], dim=1),
        weights=(1 + row_numbers % 3).float(),
        terms=torch.from_numpy(pad_lists(terms, width=16)),
        step=torch.tensor(float(step)),
        steps=torch.tensor(float(STEPS)),
    )
