"""Distillation from stored teacher embeddings against distillation with the teacher in the loop.

    python -m benchmarks.teacher --json docs/results/teacher.json [--rounds N] [--batch N]

A step of stage II reads the teacher's embeddings of its queries; in the loop the teacher would encode the
batch before each step. Both are timed in turns on the same queries; weights are random, because speed does
not depend on them. The published teacher has 226 times the parameters of its student, the teacher here 122
times: with a 7B teacher the ratio is larger.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_towers import DIM, any_tokenizer
from benchmarks.report import arguments, show, write
from scalingnote.models import dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.models.prompt import TokenRow
from scalingnote.train import strategies
from scalingnote.train.config import Ranks, Schedule
from scalingnote.train.distillation.config import DistillLosses
from scalingnote.train.distillation.objective import Lesson, StageTwo

VOCABULARY, LENGTH = 8192, 64
QUERY_TOKENS = (6, 19)  # bounds, about 12 on average
EPOCHS = 100  # of the published stage II
LEARNING_RATE = 1e-4
STUDENT = (4, 256, 4, 1024)  # layers, hidden, heads, intermediate


def main() -> None:
    parser = arguments(__doc__, batch=32, rounds=3)
    shape = "layers, hidden, heads, intermediate; default: %(default)s"
    parser.add_argument("--teacher", type=int, nargs=4, default=(24, 896, 14, 4864), help=shape)
    options = parser.parse_args()
    torch.set_num_threads(1)
    teacher, student = tower("qwen2", options.teacher).eval(), tower("bert", STUDENT).train()
    schedule = Schedule(global_batch=options.batch, resources=Ranks(workers=1))
    stage = StageTwo(student, DistillLosses())
    run = strategies.build(stage, schedule=schedule, device=torch.device("cpu"))
    steps, encodings = [], []
    for number in range(options.rounds + 1):
        rows = queries(options.batch, number)
        start = time.process_time()
        with torch.inference_mode():
            teacher(collate(rows, pad=teacher.pad, packed=True))
        middle = time.process_time()
        lesson = Lesson(collate(rows, pad=student.pad, packed=True), torch.randn(options.batch, DIM))
        loss, _ = run(lesson)
        run.backward(loss)
        run.step(LEARNING_RATE)
        encodings.append(1000 * (middle - start) / options.batch)
        steps.append(1000 * (time.process_time() - middle) / options.batch)
    step_ms, encoding_ms = statistics.median(steps[1:]), statistics.median(encodings[1:])
    row = {
        "teacher, millions": millions(teacher),
        "student, millions": millions(student),
        "step, stored ms": step_ms,
        "step, in the loop ms": step_ms + encoding_ms,
    }
    show("Processor milliseconds per query", [row])
    metrics = {
        "stored_teacher_speedup": (step_ms + encoding_ms) / step_ms,
        "stored_teacher_speedup_100_epochs": EPOCHS
        * (step_ms + encoding_ms)
        / (EPOCHS * step_ms + encoding_ms),
    }
    write(options.json, metrics=metrics, steps=[row])


def tower(architecture: str, shape: tuple[int, ...]) -> Any:
    """Return a query tower with random weights."""
    names = ("layers", "hidden", "heads", "intermediate")
    sizes = dict(zip(names, shape, strict=True)) | {"vocabulary": VOCABULARY}
    backbone = Scratch.model_validate({"architecture": architecture, **sizes})
    config = TowerConfig(backbone=backbone, max_length=LENGTH)
    tokenizer = any_tokenizer().backend_tokenizer.to_str()
    return dual_encoder.build_tower(config, role="query", dim=DIM, tokenizer_json=tokenizer, seed=0)


def queries(count: int, number: int) -> list[TokenRow]:
    """Return token rows that are pooled at the last position."""
    rng = np.random.default_rng(number)
    lengths = rng.integers(*QUERY_TOKENS, count).tolist()
    return [TokenRow(rng.integers(10, 200, length).tolist(), [length - 1]) for length in lengths]


def millions(module: Any) -> float:
    """Count millions of parameters without token embeddings."""
    count = sum(value.numel() for value in module.parameters())
    return float(count - module.token_embeddings.weight.numel()) / 1e6


if __name__ == "__main__":
    main()
