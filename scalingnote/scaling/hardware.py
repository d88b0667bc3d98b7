"""GPUs by name, and how much one of them sends to the others in a step."""

from dataclasses import dataclass

from scalingnote.scaling.activations import Numbers
from scalingnote.scaling.config import GpuName
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Strategy

GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, by its makers' figures."""

    memory: float  # bytes that a program can use
    peak: float  # dense bfloat16 operations per second
    link: float  # GB/s to the other GPUs of its node, one way


GPUS: dict[GpuName, Gpu] = {
    "H200": Gpu(139 * GIB, 989e12, 450.0),
    "H100": Gpu(79 * GIB, 989e12, 450.0),
    "A100": Gpu(79 * GIB, 312e12, 300.0),
    "L40S": Gpu(44 * GIB, 362e12, 32.0),
    "L4": Gpu(22 * GIB, 121e12, 32.0),
}


def exchanged(
    strategy: Strategy, *, gathered: float, reduced: float, trained: int, gpus: int, numbers: Numbers
) -> float:
    """Bytes one GPU sends in a step, around a ring.

    `gathered` and `reduced` count parameters of sharded towers once for every time they are gathered or their
    gradients reduced in the step. Gradients are reduced in float32.
    """
    wide = 4 if numbers == "float32" else 2
    match strategy:
        case Ddp():
            moved = 2 * 4.0 * trained  # reduced and handed out again, once a step
        case Fsdp2(reshard=reshard):
            moved = wide * (gathered if reshard else gathered / 2) + 4.0 * reduced
        case DeepSpeed(stage=3):
            moved = wide * gathered + 4.0 * reduced
        case DeepSpeed(stage=stage):
            moved = 4.0 * (reduced if stage == 2 else trained) + wide * trained
    return moved * (gpus - 1) / gpus
