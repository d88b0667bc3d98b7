"""What a student inherits of a cross-encoder: whether stored documents keep the order of its scores.

A student searches documents that the cross-encoder read beside an empty query, by cosine or by dot, as the
cross-encoder's score is one of cosines or of products.

    ce_rank_agreement    share of document pairs that this search orders as the cross-encoder's score of the
                         same proxies does: what length and precision of stored vectors cost (bar: .99)
    ce_joint_agreement   the same against its score of query and document read together: what reading them
                         apart costs

Over the best documents of sampled validation queries, without pairs that are closer than float16 can tell.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from scalingnote import topk
from scalingnote.cross_encoder.config import score_temperature
from scalingnote.cross_encoder.pairs import PairEncoder, relevance
from scalingnote.evaluate.pool import INDEXED_VIEW
from scalingnote.models.prompt import Row
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact

QUERIES, CANDIDATES = 32, 50
FIELDS = ["doc_id", "title", "topic", "content"]
TOLD_APART = 2e-3  # cosines that float16 keeps in order


def agreements(built: Mapping[str, Artifact], *, queries: int = QUERIES, seed: int = 0) -> dict[str, float]:
    """Both measures.

    Args:
        built: the artifacts cross_encoder, query_embeddings, embeddings and dataset of one run.
        queries: sampled of the validation split; of all where it has none.
        seed: of the sample.
    """
    temperature = score_temperature(built["cross_encoder"].manifest.config)
    encoder = PairEncoder.load(built["cross_encoder"].directory("model"), temperature=temperature)
    asked = built["query_embeddings"].table("embeddings", ["query", "split", "embedding"])
    held_out = np.flatnonzero(np.asarray(asked["split"]) == "validation")
    among = held_out if len(held_out) else np.arange(len(asked))
    rng = np.random.default_rng(seed)
    chosen = asked.take(np.sort(rng.choice(among, min(queries, len(among)), replace=False)))
    proxies = arrow.to_numpy(chosen["embedding"])
    stored = built["embeddings"].table("embeddings", ["doc_id", INDEXED_VIEW])
    found, best = topk.search(
        arrow.l2_normalize(proxies), arrow.to_numpy(stored[INDEXED_VIEW]), k=min(CANDIDATES, len(stored))
    )
    distinct, place = np.unique(best, return_inverse=True)
    place = place.reshape(best.shape)
    documents = _rows(encoder, built["dataset"], stored["doc_id"].take(distinct).to_pylist())
    scored = _scores(proxies, encoder.documents(documents)[place], temperature)
    rows = encoder.model.query_prompt.rows(chosen["query"].to_pylist())
    pairs = [documents[at] for at in place.ravel().tolist()]
    together = encoder.scores([row for row in rows for _ in range(best.shape[1])], pairs)
    told = {"ce_rank_agreement": scored, "ce_joint_agreement": together.reshape(best.shape)}
    return {name: round(agreement(found, scores), 4) for name, scores in told.items()}


def agreement(searched: Float[ndarray, "queries docs"], scored: Float[ndarray, "queries docs"]) -> float:
    """Share of the pairs of documents, told apart by search, that both orders agree on; 1 without a pair."""
    first, second = np.triu_indices(searched.shape[1], k=1)
    gap = searched[:, first] - searched[:, second]
    same = np.sign(gap) == np.sign(scored[:, first] - scored[:, second])
    clear = np.abs(gap) > TOLD_APART
    return float(same[clear].mean()) if clear.any() else 1.0


def _rows(encoder: PairEncoder, dataset: Artifact, doc_ids: Sequence[str]) -> list[Row]:
    """Documents as the cross-encoder reads them."""
    texts = {row["doc_id"]: row for row in dataset.table("documents", FIELDS).to_pylist()}
    columns = ([texts[doc_id][name] or "" for doc_id in doc_ids] for name in FIELDS[1:])
    rows = []
    for row in encoder.model.document_prompt.rows(*columns):
        if not isinstance(row, Row):  # what is wrong with a document
            raise row
        rows.append(row)
    return rows


def _scores(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "queries docs dim"],
    temperature: float | None,
) -> Float[ndarray, "queries docs"]:
    """The cross-encoder's score of every query's proxy and each of its documents' proxies."""
    count = documents.shape[1]
    pairs = np.repeat(queries, count, axis=0), documents.reshape(-1, documents.shape[2])
    left, right = map(torch.from_numpy, pairs)
    logits: ndarray = relevance(left, right, temperature).numpy()
    return logits.reshape(len(queries), count)
