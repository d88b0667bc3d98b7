"""Global batches drawn by step number alone: a resumed run, or a restarted worker, sees the same rows.

    triplets table -> permutation of the epoch -> global batch of a step -> one rank's share -> tokens

Nothing is remembered between steps, so the only state of the data order is the step.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from numpy import ndarray

from scalingnote.errors import DataError, TrainingError
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, Row
from scalingnote.models.tower import Tower, collate
from scalingnote.train.objective import Triplets

# Known positives of a query kept for masking; more than this many are not masked.
MAX_KNOWN_POSITIVES = 16


def hash_ids(ids: Sequence[str]) -> Int[ndarray, " ids"]:
    """Stable 63-bit integers of string ids, comparable across processes and machines."""
    digests = [hashlib.blake2b(value.encode(), digest_size=8).digest() for value in ids]
    return (np.frombuffer(b"".join(digests), dtype="<u8") >> 1).astype(np.int64)


def rows_of_step(
    step: int, *, rows: int, global_batch: int, rank: int, world: int, seed: int
) -> Int[ndarray, " batch"]:
    """Row numbers of one rank at one step. Each epoch is a fresh permutation; its uneven tail is left out."""
    per_epoch = rows // global_batch
    epoch, within = divmod(step, per_epoch)
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows)
    batch = order[within * global_batch : (within + 1) * global_batch]
    return batch[rank::world]


def total_steps(*, rows: int, global_batch: int, epochs: float) -> int:
    """Steps of a run; DataError when there are fewer rows than one global batch."""
    if rows < global_batch:
        raise DataError(
            f"{rows} training rows do not fill one global batch of {global_batch}: "
            "lower global_batch or collect more"
        )
    return round(rows // global_batch * epochs)


class TripletBatches:
    """Triplets of any step, for one rank. Every text is tokenised once, not once an epoch.

    `documents` must hold every document the triplets name; TrainingError otherwise.
    """

    def __init__(
        self,
        triplets: pa.Table,
        documents: pa.Table,
        *,
        query: Tower,
        document: Tower,
        global_batch: int,
        rank: int,
        world: int,
        seed: int,
    ) -> None:
        assert isinstance(query.prompt, QueryPrompt)
        assert isinstance(document.prompt, DocumentPrompt)
        self._query_pad, self._document_pad = query.pad, document.pad
        self._queries = query.prompt.rows(triplets["query"].to_pylist())
        self._documents = _document_rows(document.prompt, documents)
        self._shares = {"global_batch": global_batch, "rank": rank, "world": world, "seed": seed}
        row_of = {doc_id: row for row, doc_id in enumerate(documents["doc_id"].to_pylist())}
        positives = triplets["positive"].to_pylist()
        negatives = triplets["negatives"].to_pylist()
        try:
            self._rows = np.array(
                [
                    [row_of[doc_id] for doc_id in (first, *rest)]
                    for first, rest in zip(positives, negatives, strict=True)
                ]
            )
        except KeyError as error:
            raise TrainingError(f"triplets name document {error}, which the dataset lacks") from None
        except ValueError:
            raise TrainingError("triplets carry unequal numbers of negatives: re-run collect") from None
        self._document_hashes = hash_ids(documents["doc_id"].to_pylist())
        self._weights = triplets["weight"].to_numpy()
        query_ids = triplets["query_id"].to_pylist()
        self._query_hashes = hash_ids(query_ids)
        self._known = _known_positives(query_ids, self._document_hashes[self._rows[:, 0]])

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, step: int) -> Triplets:
        """This rank's share of a step."""
        chosen = rows_of_step(step, rows=len(self), **self._shares)
        # Positives first, then each column of negatives: the layout the objective gathers by.
        document_rows = self._rows[chosen].T.reshape(-1)
        return Triplets(
            queries=collate([self._queries[i] for i in chosen], pad=self._query_pad),
            documents=collate([self._documents[i] for i in document_rows], pad=self._document_pad),
            query_ids=torch.from_numpy(self._query_hashes[chosen]),
            document_ids=torch.from_numpy(self._document_hashes[document_rows]),
            known_positives=torch.from_numpy(self._known[chosen]),
            weights=torch.from_numpy(self._weights[chosen]),
        )


def _document_rows(prompt: DocumentPrompt, documents: pa.Table) -> list[Row]:
    rows: list[Row] = []
    for batch in documents.to_batches(max_chunksize=4096):
        for row in prompt.rows(*(batch[name].to_pylist() for name in ("title", "topic", "content"))):
            if not isinstance(row, Row):
                raise TrainingError(f"training document {documents['doc_id'][len(rows)]}: {row}")
            rows.append(row)
    return rows


def _known_positives(
    query_ids: Sequence[str], positives: Int[ndarray, " rows"]
) -> Int[ndarray, "rows known"]:
    by_query: dict[str, list[int]] = {}
    for query_id, positive in zip(query_ids, positives.tolist(), strict=True):
        known = by_query.setdefault(query_id, [])
        if positive not in known and len(known) < MAX_KNOWN_POSITIVES:
            known.append(positive)
    width = max((len(known) for known in by_query.values()), default=1)
    table = np.full((len(query_ids), width), -1, dtype=np.int64)
    for row, query_id in enumerate(query_ids):
        known = by_query[query_id]
        table[row, : len(known)] = known
    return table
