"""The stage II loss of one rank: the student's embeddings against the teacher's (Eq. 15)."""

from jaxtyping import Float
from torch import Tensor, nn

from scalingnote.distill.batching import Lesson
from scalingnote.losses.distillation import qkd
from scalingnote.models.tower import Tower


class StageTwo(nn.Module):
    """Student tower and loss as one module: what a data-parallel wrapper wraps."""

    def __init__(self, student: Tower, *, cosine_weight: float) -> None:
        super().__init__()
        self.student, self._cosine_weight = student, cosine_weight

    def forward(self, lesson: Lesson) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss and its squared-distance part."""
        student = self.student(lesson.queries)[:, 0]
        loss = qkd(lesson.teacher, student, cosine_weight=self._cosine_weight)
        distance = (lesson.teacher - student.detach()).pow(2).sum(-1).mean()
        return loss, {"squared_distance": distance}
