"""Stage II batches: queries and the teacher's embeddings of them, drawn by step like stage I's."""

from dataclasses import dataclass

import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from scalingnote.models.prompt import QueryPrompt
from scalingnote.models.tower import Batch, Tower, collate
from scalingnote.storage import vectors
from scalingnote.train.batching import rows_of_step


@dataclass(frozen=True)
class Lesson:
    """One rank's share of a step: what the student reads and what it should say."""

    queries: Batch
    teacher: Float[Tensor, "queries dim"]

    def to(self, device: torch.device) -> "Lesson":
        """The same lesson on a device."""
        return Lesson(self.queries.to(device), self.teacher.to(device))


class LessonBatches:
    """Tokenised queries and teacher embeddings of any step, for one rank."""

    def __init__(
        self, queries: pa.Table, *, student: Tower, global_batch: int, rank: int, world: int, seed: int
    ) -> None:
        assert isinstance(student.prompt, QueryPrompt)
        self._rows = student.prompt.rows(queries["query"].to_pylist())
        self._teacher = torch.tensor(vectors.to_numpy(queries["embedding"]))
        self._pad = student.pad
        self._shares = {"global_batch": global_batch, "rank": rank, "world": world, "seed": seed}

    def __call__(self, step: int) -> Lesson:
        """This rank's share of a step."""
        chosen = rows_of_step(step, rows=len(self._rows), **self._shares)
        batch = collate([self._rows[i] for i in chosen], pad=self._pad)
        return Lesson(batch, self._teacher[torch.from_numpy(chosen)])
