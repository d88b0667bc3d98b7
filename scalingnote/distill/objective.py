"""The stage II loss of one rank: the student's embeddings against the teacher's (Eq. 15)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalingnote.distill.batching import Lesson
from scalingnote.losses.distillation import qkd
from scalingnote.models.batch import Batch
from scalingnote.models.tower import Tower
from scalingnote.train.distributed import shares


class StageTwo(nn.Module):
    """Student tower and loss as one module; what a step trains, plainly or through GradCache."""

    def __init__(self, student: Tower, *, cosine_weight: float, uneven: bool = False) -> None:
        """`uneven`: ranks may bring different numbers of rows, and tell each other at every step."""
        super().__init__()
        self.student, self._cosine_weight, self._uneven = student, cosine_weight, uneven

    def forward(self, lesson: Lesson) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of this rank (its mean over ranks is the global loss) and its parts, for the log."""
        inputs = self.inputs(lesson)
        return self.loss({name: self.encode(name, rows) for name, rows in inputs.items()}, lesson)

    def inputs(self, lesson: Lesson) -> dict[str, Batch | None]:
        """The student's rows."""
        return {"query": lesson.queries}

    def encode(self, name: str, rows: Batch | None) -> Float[Tensor, "rows views dim"]:
        """The student's embeddings of some rows, in float32."""
        return self.student(rows).float()  # type: ignore[no-any-return]

    def loss(
        self, embeddings: dict[str, Tensor], lesson: Lesson
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """This rank's loss and its squared-distance part, both such that means over ranks are global."""
        student = embeddings["query"][:, 0]
        weight = shares(student, uneven=self._uneven).weight
        with torch.autocast(student.device.type, enabled=False):
            loss = weight * qkd(lesson.teacher, student, cosine_weight=self._cosine_weight)
            distance = weight * (lesson.teacher - student.detach()).pow(2).sum(-1).mean()
        return loss, {"squared_distance": distance}
