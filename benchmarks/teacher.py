"""Distilling from stored teacher embeddings against distilling with the teacher in the loop.

    python -m benchmarks.teacher --json docs/results/teacher.json [--rounds N] [--batch N]

Both ways take the same steps: the same batches, student, loss, optimizer and precision. One reads the
teacher's embeddings from the store that stage II reads, the other asks the teacher for them. Steps of both
alternate in one process, and medians count. The teacher's weights are random: its speed does not depend on
them.

The published teacher has 226 times the parameters of its student (6,526 and 29 million, without token
embeddings). By default the two here are closer (391 and 3.2 million): what is measured is then less than a
7B teacher would show.
"""

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.report import arguments, show, write
from scalingnote.config import Config
from scalingnote.distillation import prepare
from scalingnote.distillation.config import DistillLosses
from scalingnote.distillation.objective import Lesson, LessonBatches, StageTwo
from scalingnote.encode.encoder import Encoder
from scalingnote.models import dual_encoder
from scalingnote.models.backbone import train_tokenizer
from scalingnote.models.config import LookupConfig, Scratch, TowerConfig
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train import strategies
from scalingnote.train.config import Ranks, Schedule
from scalingnote.train.data import Order, Store

Row = dict[str, Any]
VOCABULARY, DIM, LENGTH = 8192, 128, 64
WORDS = (4, 13)  # of a query, about 12 tokens with those that words break into
EPOCHS = 100  # of the published stage II


class Nothing(Config):
    """The config of an artifact made here."""


def main() -> None:
    """Parse arguments, run, print and write."""
    options = parser().parse_args()
    made = run(options)
    rows, facts = made["steps"], made["teacher"]
    asking = f"asked once: {facts['asked once ms']:.3g} ms a query"
    show(f"Milliseconds per query seen; teacher: qwen2, {facts['millions']:,.0f}M; {asking}", rows)
    write(options.json, **made)


def parser() -> ArgumentParser:
    """The knobs and their defaults."""
    parser = arguments(__doc__)
    shapes = "layers, hidden, heads, intermediate; default: %(default)s"
    parser.add_argument("--teacher", type=int, nargs=4, default=(24, 896, 14, 4864), help=shapes)
    parser.add_argument("--student", type=int, nargs=4, default=(4, 256, 4, 1024), help=shapes)
    parser.add_argument("--batch", type=int, default=128, help="queries of a step, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way, default: %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all cores")
    return parser


def run(options: Namespace) -> dict[str, Any]:
    """Metrics, the teacher's shape, and a row per student."""
    torch.set_num_threads(options.threads)
    texts = queries(options.batch * (options.rounds + 1))
    tokenizer = train_tokenizer(texts, vocabulary=VOCABULARY)
    teacher = Encoder(_tower("qwen2", options.teacher, tokenizer))
    with TemporaryDirectory() as folder:
        artifact, once = asked(teacher, texts, f"{folder}/embeddings")
        rows = [
            {"student": name, **measure(made, teacher, artifact, texts, f"{folder}/{name}", options)}
            for name, made in students(options.student, tokenizer).items()
        ]
    for row in rows:
        row["whole run"] = EPOCHS * row["in the loop ms"] / (EPOCHS * row["stored ms"] + 1000 * once)
    shape = dict(zip(("layers", "hidden", "heads", "intermediate"), options.teacher, strict=True))
    return {
        "metrics": {
            "stored_teacher_speedup": rows[0]["speedup"],
            "stored_teacher_speedup_100_epochs": rows[0]["whole run"],
            "lookup_stored_teacher_speedup": rows[-1]["speedup"],
        },
        "teacher": {**shape, "millions": _millions(teacher.tower), "asked once ms": 1000 * once},
        "batch": options.batch,
        "steps": rows,
    }


def queries(count: int) -> list[str]:
    """Distinct queries of made-up words, frequent ones and rare ones."""
    rng = np.random.default_rng(0)
    syllables = ["ba", "ko", "li", "me", "nu", "ra", "si", "ta", "ve", "zo"]
    words = ["".join(rng.choice(syllables, size)) for size in rng.integers(1, 5, 4000)]
    ranks = (rng.pareto(1.0, (count, WORDS[1])) * 10).astype(int) % len(words)
    sizes = rng.integers(*WORDS, count)
    return [
        f"{number} " + " ".join(words[rank] for rank in row[:size])
        for number, (row, size) in enumerate(zip(ranks, sizes, strict=True))
    ]


def students(shape: tuple[int, ...], tokenizer: str) -> dict[str, torch.nn.Module]:
    """A transformer of this shape, and a lookup."""
    lookup = LookupConfig(max_length=LENGTH)
    return {
        f"bert {shape[0]} x {shape[1]}": _tower("bert", shape, tokenizer),
        "lookup": dual_encoder.build_query_tower(lookup, dim=DIM, tokenizer_json=tokenizer, seed=0),
    }


def asked(teacher: Encoder, texts: list[str], uri: str) -> tuple[Artifact, float]:
    """The teacher's embeddings of all queries as its job leaves them, and the seconds per query they took."""
    teacher.encode_queries(texts[:8])
    start = time.perf_counter()
    embeddings = teacher.encode_queries(texts)
    seconds = (time.perf_counter() - start) / len(texts)
    ids = [str(number) for number in range(len(texts))]
    table = pa.table({"query_id": ids, "query": texts, "split": ["train"] * len(texts)})
    draft = Draft(uri, kind="query_embeddings", config=Nothing(), parents={})
    draft.write_table(
        "embeddings/part-00000.parquet", table.append_column("embedding", arrow.to_arrow(embeddings))
    )
    return draft.commit(counts={}), seconds


def measure(
    made: Any, teacher: Encoder, stored: Artifact, texts: list[str], folder: str, options: Any
) -> Row:
    """Milliseconds per query seen of both ways, from alternating steps of one student, the first unseen."""
    sizes = prepare.prepare(stored, prompt=made.prompt, folder=folder)
    order = Order(sizes, global_batch=options.batch, seed=0)
    lessons = LessonBatches(Store.open(folder), order, pad=made.pad, packed=True, rank=0, world=1)
    schedule = Schedule(global_batch=options.batch, resources=Ranks(workers=1))
    run = strategies.build(
        StageTwo(made.train(), DistillLosses()), schedule=schedule, device=torch.device("cpu")
    )

    def step(lesson: Lesson) -> None:
        loss, _ = run(lesson)
        run.backward(loss)
        run.step(1e-4)

    def in_the_loop(number: int) -> None:
        lesson = lessons(number)
        read = [texts[row] for row in order.batch(number).tolist()]
        step(Lesson(lesson.queries, torch.from_numpy(teacher.encode_queries(read))))

    ways: dict[str, Callable[[int], None]] = {
        "stored": lambda number: step(lessons(number)),
        "in the loop": in_the_loop,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(number)
            seconds[name].append(time.perf_counter() - start)
    middle = {name: 1000 * statistics.median(values[1:]) / options.batch for name, values in seconds.items()}
    ratios = [loop / kept for kept, loop in zip(*(seconds[name][1:] for name in ways), strict=True)]
    return {
        "millions": _millions(made),
        **{f"{name} ms": value for name, value in middle.items()},
        "speedup": statistics.median(ratios),
    }


def _tower(architecture: str, shape: tuple[int, ...], tokenizer: str) -> Any:
    layers, hidden, heads, intermediate = shape
    backbone = Scratch.model_validate(
        {
            "architecture": architecture,
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "intermediate": intermediate,
            "vocabulary": VOCABULARY,
        }
    )
    config = TowerConfig(backbone=backbone, max_length=LENGTH)
    return dual_encoder.build_tower(config, role="query", dim=DIM, tokenizer_json=tokenizer, seed=0)


def _millions(module: Any) -> float:
    """Parameters, less those of token embeddings and tables."""
    count = sum(value.numel() for value in module.parameters())
    table = module.token_embeddings.weight if hasattr(module, "token_embeddings") else module.table
    return float(count - table.numel()) / 1e6


if __name__ == "__main__":
    main()
