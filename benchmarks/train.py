"""Stage I's step against sentence-transformers': samples a second, peak memory, formats of frozen layers.

    python -m benchmarks.train --json docs/results/train.json [--batch N] [--rounds N]

Both sides train two towers with random weights on the same triplets with the same loss (checked), GradCache,
Matryoshka prefixes and AdamW; see train_sides.py. Each side first finds its best chunk size, for texts of
many lengths and of equal length. Then both take turns step by step in one process. The result is the median
of the steps' ratios of processor time, because the machine's speed changes within seconds.

The peak memory of the batch `--largest` is compared with that of 32.

LoRA towers on one frozen backbone of 512, with layers stored in full precision, in 8 and in 4 bits: bytes of
the layers, and the step's processor time.
"""

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import arguments, run_isolated, show, write
from benchmarks.train_sides import (
    Architecture,
    Setting,
    Side,
    Size,
    frozen_mb,
    measure_in_turns,
    measure_peak_mb,
    save_backbone,
)
from scalingnote.models.config import Stored

Row = dict[str, Any]
SIDES: tuple[Side, Side] = ("ours", "sentence-transformers")
CHUNKS = (16, 32, 64)
# Queries and documents differ in length: ours has two chunk sizes, its peer a token budget.
SEPARATE = ((64, 16), (64, 32))
BUDGETS = (1024, 4096)
SPREADS = {"spread": 0.5, "equal": 0.0}  # of the logarithm of lengths
# For peak memory glibc returns freed blocks at once: holes would raise the peak.
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SIZE = Size(layers=2, hidden=128)
STEPS = 4  # timed, after a first one
TRIALS = 7  # steps of each setting in the search for the fastest
SAME = 1e-4  # largest relative difference of the two losses
BASES: tuple[Stored, ...] = ("full", "int8", "nf4")
BASE_SIZE, BASE_BATCH = Size(layers=2, hidden=512), 32  # matrices that cost more than their unpacking


def main() -> None:
    options = arguments(__doc__, batch=64, rounds=3, largest=1024).parse_args()
    speed = _speed(SIZE, options)
    os.environ.update(RETURN_FREED)
    with _backbone("bert", SIZE) as folder:
        memory = [_memory(folder, Setting(s, rows)) for s in SIDES for rows in (32, options.largest)]
    show("Peak memory with chunks of 32 rows (bert)", memory)
    with _backbone("qwen2", BASE_SIZE) as folder:
        bases = _bases(folder, options)
    show(f"LoRA on frozen layers of {BASE_SIZE.hidden}, {BASE_BATCH} triplets a step", bases)
    spread_out = [row for row in speed if row["lengths"] == "spread"]
    metrics = {
        "samples_per_s_over_sentence_transformers": min(row["ratio"] for row in spread_out),
        **{
            f"samples_per_s_over_sentence_transformers_{r['backbone']}_{r['lengths']}": r["ratio"]
            for r in speed
        },
        f"peak_memory_{options.largest}_over_32": memory[1]["peak MB"] / memory[0]["peak MB"],
        "peak_memory_over_sentence_transformers": memory[1]["peak MB"] / memory[3]["peak MB"],
        **{f"base_{row['base']}_bytes_over_full": row["MB over full"] for row in bases[1:]},
        **{f"base_{row['base']}_time_over_full": row["time over full"] for row in bases[1:]},
    }
    write(options.json, metrics=metrics, speed=speed, memory=memory, bases=bases, size=vars(SIZE))


@contextmanager
def _backbone(architecture: Architecture, size: Size) -> Iterator[str]:
    """Yield a folder with a backbone of random weights."""
    with TemporaryDirectory() as folder:
        save_backbone(Path(folder), architecture, size)
        yield folder


def _speed(size: Size, options: Any) -> list[Row]:
    """Measure a step of ours over one of sentence-transformers' cached loss, each with its best chunk."""
    speeds: list[Row] = []
    architectures: tuple[Architecture, ...] = ("bert", "qwen2")
    for architecture in architectures:
        with _backbone(architecture, size) as folder:
            for lengths in SPREADS:
                best = {side: _tuned(folder, size, side, lengths, options) for side in SIDES}
                row = _rounds(folder, size, best, options)
                speeds.append({"backbone": architecture, "lengths": lengths, **row})
    show(f"{options.batch} triplets a step, {size.layers} layers of {size.hidden}", speeds)
    return speeds


def _bases(folder: str, options: Any) -> list[Row]:
    """Measure LoRA steps on a frozen backbone in each format; the formats take turns."""
    settings = [Setting("ours", BASE_BATCH, plain=True, base=base) for base in BASES]
    rounds = _turns(folder, BASE_SIZE, settings, options)
    sizes = {base: run_isolated(frozen_mb, folder, BASE_SIZE, base) for base in BASES}
    return [
        {
            "base": base,
            "MB": sizes[base],
            "MB over full": sizes[base] / sizes["full"],
            "samples/cpu s": _rate(rounds, place, BASE_BATCH),
            "time over full": _time_ratio(rounds, place, BASES.index("full")),
        }
        for place, base in enumerate(BASES)
    ]


def _tuned(folder: str, size: Size, side: Side, lengths: str, options: Any) -> Setting:
    """Return the fastest setting of a side for these lengths; all settings take turns."""
    base = Setting(side, options.batch, spread=SPREADS[lengths])
    settings = [replace(base, chunks=(rows, rows)) for rows in CHUNKS if rows <= options.batch]
    if side == "sentence-transformers":
        settings += [replace(base, budget=tokens) for tokens in BUDGETS]
    else:
        settings += [replace(base, chunks=chunks) for chunks in SEPARATE if max(chunks) <= options.batch]
    figures_by_setting = run_isolated(measure_in_turns, folder, size, settings, steps=TRIALS)
    seconds = [statistics.median(figures["cpu s"]) for figures in figures_by_setting]
    return settings[seconds.index(min(seconds))]


def _rounds(folder: str, size: Size, best: dict[Side, Setting], options: Any) -> Row:
    """Measure rates of both sides and their ratios: medians over the steps of all rounds."""
    ours, theirs = best.values()
    rounds = _turns(folder, size, [ours, theirs], options)
    for mine, other in rounds:
        if abs(mine["loss"] - other["loss"]) > SAME * abs(other["loss"]):
            raise AssertionError(
                f"the two sides do not compute the same loss: {mine['loss']} and {other['loss']}"
            )
    return {
        "ours /cpu s": _rate(rounds, 0, ours.batch),
        "theirs /cpu s": _rate(rounds, 1, theirs.batch),
        "ratio": _time_ratio(rounds, 1, 0),
        "our chunks": ours.chunks,
        "their chunks": theirs.budget or theirs.chunks,
    }


def _turns(folder: str, size: Size, settings: list[Setting], options: Any) -> list[list[Row]]:
    """Return the figures of each setting in each round; each round is a new process."""
    return [
        run_isolated(measure_in_turns, folder, size, settings, steps=STEPS) for _ in range(options.rounds)
    ]


def _rate(rounds: list[list[Row]], place: int, batch: int) -> float:
    """Compute samples a processor second of the setting at `place`."""
    return float(batch / statistics.median(second for one in rounds for second in one[place]["cpu s"]))


def _time_ratio(rounds: list[list[Row]], place: int, other: int) -> float:
    """Compute the time of a step of one setting over that of the same step of another one."""
    pairs = (pair for one in rounds for pair in zip(one[place]["cpu s"], one[other]["cpu s"], strict=True))
    return float(statistics.median(mine / theirs for mine, theirs in pairs))


def _memory(folder: str, setting: Setting) -> Row:
    """Measure the peak memory of a side at a batch."""
    peak = run_isolated(measure_peak_mb, folder, SIZE, setting)
    return {"side": setting.side, "batch": setting.batch, "peak MB": peak}


if __name__ == "__main__":
    main()
