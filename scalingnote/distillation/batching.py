"""Stage II batches: queries and the teacher's embeddings of them, drawn by step like stage I's.

    query embeddings ─prepare─► store: tokens and teacher, a file per slice ─by number─► a step's lesson

Where a loss needs them, a lesson also holds candidates (:mod:`scalingnote.distillation.documents`): a row of
a batch is then a triplet, or a query without documents, and names its query by number.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor

from scalingnote.distillation import documents, validation
from scalingnote.distillation.documents import CandidateRows, Candidates, Sources
from scalingnote.log import get_logger
from scalingnote.models.batch import Batch, collate
from scalingnote.models.lookup import LookupPrompt
from scalingnote.models.prompt import QueryPrompt
from scalingnote.models.token_rows import token_columns
from scalingnote.storage import vectors
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.slices import Each, Record, Slice, listed, run_slices, slices, write_tables
from scalingnote.train.order import Order
from scalingnote.train.stream import Store, one_chunk
from scalingnote.train.tokens import query_number

log = get_logger("distill")
TABLE = "lessons"
_COLUMNS = ["query_id", "query", "embedding", "split"]
_BLOCK = 8192


def prepare(
    teacher: Artifact,
    *,
    prompt: QueryPrompt | LookupPrompt,
    folder: str,
    candidates: Sources | None = None,
    each: Each = map,
) -> dict[str, int]:
    """Write the store of a run into `folder`, or find it there; its rows, as :class:`Order` takes them.

    To be called once, before any rank starts. `teacher` holds the embeddings of queries, `prompt` is the
    student's; `folder` must belong to it, to this student and to these candidates.
    """
    if not Store.finished(folder):
        if candidates is not None:
            documents.name(candidates, folder=folder, each=each)
        task = partial(_slice, teacher=teacher, prompt=prompt, folder=folder)
        parts = slices(teacher, "embeddings")
        records = run_slices(TABLE, task, parts, folder=folder, each=each, room="distill")
        tables = {
            name: [file for record in records for file in listed(record[key])]
            for name, key in ((TABLE, "files"), (validation.TABLE, "validation"))
        }
        facts = {"sizes": {TABLE: sum(part.rows or 0 for _, part in tables[TABLE])}, "dim": records[0]["dim"]}
        if candidates is not None:
            more, counted = documents.prepare(candidates, teacher, records, folder=folder, each=each)
            tables, facts = tables | more, facts | counted
        Store.finish(folder, tables, facts)
    found = Store.facts_of(folder)
    if found.get("left_out"):
        log.warning(
            "%s triplets left out: they name documents without an embedding", f"{found['left_out']:,}"
        )
    sizes: dict[str, int] = found["sizes"]
    return sizes


def _slice(item: Slice, *, teacher: Artifact, prompt: QueryPrompt | LookupPrompt, folder: str) -> Record:
    table = pa.concat_tables(teacher.table(part, _COLUMNS) for part in item[1])
    written: dict[str, Any] = {}
    for name, split, key in ((TABLE, "train", "files"), (validation.TABLE, "validation", "validation")):
        rows = lesson_slice(table.filter(pc.equal(table["split"], split)), prompt=prompt)
        written[key] = write_tables(folder, {f"{name}/{item[0]:05d}.arrow": rows})
    return written | {"dim": table.schema.field("embedding").type.list_size}


def lesson_slice(queries: pa.Table, *, prompt: QueryPrompt | LookupPrompt) -> pa.Table:
    """Numbers (``query``) and token rows of queries beside their ``teacher`` embeddings."""
    texts = queries["query"].to_pylist()
    blocks = (prompt.rows(texts[start : start + _BLOCK]) for start in range(0, len(texts), _BLOCK))
    number = pa.array(query_number(queries["query_id"]))
    teacher = vectors.to_arrow(vectors.to_numpy(queries["embedding"]))
    return one_chunk({"query": number, **token_columns(blocks, views=1), "teacher": teacher})


@dataclass(frozen=True)
class Lesson:
    """One rank's share of a step: what the student reads and what it should say."""

    queries: Batch
    teacher: Float[Tensor, "queries dim"]
    weights: Float[Tensor, " queries"] | None = None  # of each row in the losses over queries; None: all 1
    candidates: Candidates | None = None

    def to(self, device: torch.device) -> "Lesson":
        """The same lesson on a device."""
        parts = vars(self).items()
        moved: dict[str, Any] = {name: None if part is None else part.to(device) for name, part in parts}
        return Lesson(**moved)


class LessonBatches:
    """Lessons of any step, for one rank, from a store that :func:`prepare` wrote.

    `pad` is the pad token of the student, `document_pad` that of the one that reads documents, if any.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        *,
        pad: int,
        packed: bool,
        rank: int,
        world: int,
        document_pad: int | None = None,
    ) -> None:
        self._lessons, self._order = store[TABLE], order
        self._candidates = None
        if documents.ROWS in store.tables:
            self._candidates = CandidateRows(store, pad=document_pad, packed=packed)
        self._pad, self._packed, self._rank, self._world = pad, packed, rank, world

    def __call__(self, step: int) -> Lesson:
        """This rank's share of a step."""
        drawn = self._order.batch(step, length_of=self._lengths)[self._rank :: self._world]
        chosen, weights, candidates = drawn, None, None
        if self._candidates is not None:
            chosen, weights = self._candidates.lessons(drawn), self._candidates.weights(drawn)
            candidates = self._candidates(drawn)
        batch = collate(self._lessons.tokens(chosen), pad=self._pad, packed=self._packed)
        teacher = torch.from_numpy(self._lessons.values("teacher", chosen))
        return Lesson(batch, teacher, weights, candidates)

    def _lengths(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
        chosen = rows if self._candidates is None else self._candidates.lessons(rows)
        return self._lessons.lengths(chosen)
