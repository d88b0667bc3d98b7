"""Stage II batches: queries and the teacher's embeddings of them, drawn by step like stage I's.

query embeddings ─prepare─► store: tokens and teacher, a file per slice ─by number─► a step's lesson
"""

from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor

from scalingnote.models.config import TowerConfig
from scalingnote.models.prompt import QueryPrompt
from scalingnote.models.tower import Batch, collate
from scalingnote.storage import vectors
from scalingnote.storage.artifact import Artifact
from scalingnote.train import corpus
from scalingnote.train.order import Order
from scalingnote.train.slices import Each, Record, Slice, listed, run_slices, slices, write_tables
from scalingnote.train.stream import Store, one_chunk, token_columns

TABLE = "lessons"
_COLUMNS = ["query", "embedding", "split"]
_BLOCK = 8192


def prepare(
    teacher: Artifact, *, student: TowerConfig, tokenizer_json: str | None, folder: str, each: Each = map
) -> dict[str, int]:
    """Write the store of a run into `folder`, or find it there; its rows, as :class:`Order` takes them.

    To be called once, before any rank starts. `teacher` holds the embeddings of queries; `folder` must
    belong to it and to this student.
    """
    if not Store.finished(folder):
        prompt = corpus.prompt(student, role="query", tokenizer_json=tokenizer_json)
        assert isinstance(prompt, QueryPrompt)
        task = partial(_slice, teacher=teacher, prompt=prompt, folder=folder)
        parts = slices(teacher, "embeddings")
        records = run_slices(TABLE, task, parts, folder=folder, each=each, room="distill")
        files = [file for record in records for file in listed(record["files"])]
        facts = {"sizes": {TABLE: sum(part.rows or 0 for _, part in files)}, "dim": records[0]["dim"]}
        Store.finish(folder, {TABLE: files}, facts)
    sizes: dict[str, int] = Store.facts_of(folder)["sizes"]
    return sizes


def _slice(item: Slice, *, teacher: Artifact, prompt: QueryPrompt, folder: str) -> Record:
    table = pa.concat_tables(teacher.table(part, _COLUMNS) for part in item[1])
    lessons = lesson_slice(table.filter(pc.equal(table["split"], "train")), prompt=prompt)
    files = write_tables(folder, {f"{TABLE}/{item[0]:05d}.arrow": lessons})
    return {"files": files, "dim": lessons.schema.field("teacher").type.list_size}


def lesson_slice(queries: pa.Table, *, prompt: QueryPrompt) -> pa.Table:
    """Token rows of queries beside their ``teacher`` embeddings."""
    texts = queries["query"].to_pylist()
    blocks = (prompt.rows(texts[start : start + _BLOCK]) for start in range(0, len(texts), _BLOCK))
    teacher = vectors.to_arrow(vectors.to_numpy(queries["embedding"]))
    return one_chunk({**token_columns(blocks, views=1), "teacher": teacher})


@dataclass(frozen=True)
class Lesson:
    """One rank's share of a step: what the student reads and what it should say."""

    queries: Batch
    teacher: Float[Tensor, "queries dim"]

    def to(self, device: torch.device) -> "Lesson":
        """The same lesson on a device."""
        return Lesson(self.queries.to(device), self.teacher.to(device))


class LessonBatches:
    """Lessons of any step, for one rank, from a store that :func:`prepare` wrote. `pad` is the student's."""

    def __init__(self, store: Store, order: Order, *, pad: int, packed: bool, rank: int, world: int) -> None:
        self._rows, self._order = store[TABLE], order
        self._pad, self._packed, self._rank, self._world = pad, packed, rank, world

    def __call__(self, step: int) -> Lesson:
        """This rank's share of a step."""
        chosen = self._order.batch(step, length_of=self._rows.lengths)[self._rank :: self._world]
        batch = collate(self._rows.tokens(chosen), pad=self._pad, packed=self._packed)
        return Lesson(batch, torch.from_numpy(self._rows.values("teacher", chosen)))
