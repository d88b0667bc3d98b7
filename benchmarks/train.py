"""Stage I's step against others': samples a second, peak memory, and how flat memory stays.

    python -m benchmarks.train --json docs/results/train.json [--batch N] [--hidden N] [--rounds N]

Ours and sentence-transformers' train two towers with random weights on the same triplets with the same loss
(checked), GradCache, Matryoshka prefixes and AdamW; see train_sides.py. Each side first finds its best chunk
size, for lengths that differ and for equal ones. Then both take turns in one process, step by step, and the
median of the steps' ratios counts: within seconds this machine's speed changes by a tenth. Tevatron
(0.1.0, what the registry has) trains without any of these, and is compared with such a step of ours. Ratios
are of processor time, which other work on the machine does not stretch; those by the clock stand beside them.

LoRA towers on one frozen backbone of 512, its layers stored whole, in 8 and in 4 bits: bytes of the layers,
and the step's processor time.

A checkpoint's slopes are of 1.6 GB of weights and moments on this disk: what the loop waits for while tensors
are copied, what the background needs to write, and what a restart needs to read. A rank reads its own shard
alone: of two 7B towers with AdamW, 180 GB in all, 5.7 GB on each of 32 ranks.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import alone, arguments, show, write
from benchmarks.train_sides import (
    Architecture,
    Setting,
    Side,
    Size,
    frozen_mb,
    measure,
    measure_in_turns,
    save_backbone,
)
from scalingnote.models.config import Stored

Row = dict[str, Any]
SIDES: tuple[Side, Side] = ("ours", "sentence-transformers")
CHUNKS = (16, 32, 64)
# Rows of unlike length want unlike chunks: ours are told both, sentence-transformers has a budget of tokens.
SEPARATE = ((64, 16), (64, 32))
BUDGETS = (1024, 4096)
SPREADS = {"spread": 0.5, "equal": 0.0}  # of the logarithm of lengths
# For the processes whose memory is compared: glibc gives freed blocks back at once. Otherwise blocks of
# changing sizes leave holes, and the peak tells of those instead of what was in use.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STEPS = 4  # that are timed, after a first one
TRIALS = 7  # steps of every setting, while the fastest is looked for
SAME = 1e-4  # largest relative difference of the two losses
BASES: tuple[Stored, ...] = ("full", "int8", "nf4")
BASE_SIZE, BASE_BATCH = Size(layers=2, hidden=512), 32  # matrices that cost more than their unpacking
CHECKPOINT_SHAPE = (8192, 16384)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=64, help="triplets of a step, default: %(default)s")
    parser.add_argument("--hidden", type=int, default=128, help="of the backbones, default: %(default)s")
    parser.add_argument("--layers", type=int, default=2, help="of the backbones, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of each process, default: %(default)s")
    parser.add_argument("--largest", type=int, default=1024, help="batch whose memory is compared with 32's")
    options = parser.parse_args()
    size = Size(layers=options.layers, hidden=options.hidden)
    speed, plain = _speed(size, options), _plain(size, options)
    os.environ.update(GIVE_BACK)
    with _backbone("bert", size) as folder:
        memory = [
            row for side in SIDES for row in _memory(folder, size, side, (32, options.largest), options)
        ]
    show("Peak memory with chunks of 32 rows (bert)", memory)
    with _backbone("qwen2", BASE_SIZE) as folder:
        bases = _bases(folder, options)
    show(f"LoRA on frozen layers of {BASE_SIZE.hidden}, {BASE_BATCH} triplets a step", bases)
    with TemporaryDirectory() as folder:
        checkpoint = alone(_checkpoint, folder)
    show("A checkpoint, seconds a GB", [checkpoint])

    spread_out = [row for row in speed if row["lengths"] == "spread"]
    metrics = {
        "samples_per_s_over_sentence_transformers": min(row["ratio"] for row in spread_out),
        **{
            f"samples_per_s_over_sentence_transformers_{r['backbone']}_{r['lengths']}": r["ratio"]
            for r in speed
        },
        **{f"by_the_clock_{r['backbone']}_{r['lengths']}": r["by the clock"] for r in speed},
        **{f"samples_per_s_over_tevatron_{r['lengths']}": r["ratio"] for r in plain},
        f"peak_memory_{options.largest}_over_32": memory[1]["peak MB"] / memory[0]["peak MB"],
        f"peak_memory_of_the_step_{options.largest}_over_32": memory[1]["step MB"] / memory[0]["step MB"],
        "peak_memory_over_sentence_transformers": memory[1]["peak MB"] / memory[3]["peak MB"],
        **{f"base_{row['base']}_bytes_over_full": row["MB over full"] for row in bases[1:]},
        **{f"base_{row['base']}_time_over_full": row["time over full"] for row in bases[1:]},
        "checkpoint_wait_s_per_gb": checkpoint["copy"],
        "checkpoint_write_s_per_gb": checkpoint["write"],
        "restart_s_per_gb": checkpoint["restart"],
    }
    write(
        options.json,
        metrics=metrics,
        speed=speed,
        plain=plain,
        memory=memory,
        bases=bases,
        checkpoint=checkpoint,
        size=vars(size),
    )


@contextmanager
def _backbone(architecture: Architecture, size: Size) -> Iterator[str]:
    """A folder with a backbone of random weights."""
    with TemporaryDirectory() as folder:
        save_backbone(Path(folder), architecture, size)
        yield folder


def _speed(size: Size, options: Any) -> list[Row]:
    """A step of ours over one of sentence-transformers' cached loss, each with its best chunk."""
    found: list[Row] = []
    architectures: tuple[Architecture, ...] = ("bert", "qwen2")
    for architecture in architectures:
        with _backbone(architecture, size) as folder:
            for lengths in SPREADS:
                best = {side: _tuned(folder, size, side, lengths, options) for side in SIDES}
                row = _rounds(folder, size, best, options)
                found.append({"backbone": architecture, "lengths": lengths, **row})
    show(f"{options.batch} triplets a step, {size.layers} layers of {size.hidden}", found)
    return found


def _plain(size: Size, options: Any) -> list[Row]:
    """A step without GradCache over one of Tevatron's."""
    sides: tuple[Side, Side] = ("ours", "tevatron")
    found: list[Row] = []
    with _backbone("bert", size) as folder:
        for lengths, spread in SPREADS.items():
            settings = {side: Setting(side, options.batch, spread=spread, plain=True) for side in sides}
            found.append({"lengths": lengths, **_rounds(folder, size, settings, options)})
    show("A step without GradCache and prefixes (bert), beside Tevatron's", found)
    return found


def _bases(folder: str, options: Any) -> list[Row]:
    """LoRA steps on a frozen backbone in each format; the formats take turns."""
    settings = [Setting("ours", BASE_BATCH, plain=True, base=base) for base in BASES]
    rounds = _turns(folder, BASE_SIZE, settings, options)
    sizes = {base: alone(frozen_mb, folder, BASE_SIZE, base) for base in BASES}
    return [
        {
            "base": base,
            "MB": sizes[base],
            "MB over full": sizes[base] / sizes["full"],
            "samples/cpu s": _rate(rounds, place, BASE_BATCH),
            "time over full": _time_ratio(rounds, "cpu s", place, BASES.index("full")),
        }
        for place, base in enumerate(BASES)
    ]


def _checkpoint(folder: str) -> Row:
    """Seconds a GB of a checkpoint: copied, written, read again by a fresh process's engine."""
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager

    from scalingnote.train.checkpoint import STAGING, Checkpoints
    from scalingnote.train.config import Schedule
    from scalingnote.train.strategies import build

    device = torch.device("cpu")
    source, target = (
        build(torch.nn.Linear(*CHECKPOINT_SHAPE, bias=False), schedule=Schedule(), device=device)
        for _ in range(2)
    )
    gb = sum(tensor.nbytes for tensor in source.state().values()) / 1e9
    checkpoints = Checkpoints(f"{folder}/checkpoints", keep=1)
    marks = [time.perf_counter()]
    # Without a process group `save` waits for its files, so the copy is timed alone.
    DefaultStager(STAGING).stage(source.state())
    marks.append(time.perf_counter())
    checkpoints.save(1, source, {})
    checkpoints.wait()
    marks.append(time.perf_counter())
    if checkpoints.restore(target) is None:
        raise AssertionError("no checkpoint was written")
    marks.append(time.perf_counter())
    if not all(map(torch.equal, source.state().values(), target.state().values())):
        raise AssertionError("what was restored is not what was saved")
    copy, both, restart = (end - start for start, end in pairwise(marks))
    return {"GB": gb, "copy": copy / gb, "write": (both - copy) / gb, "restart": restart / gb}


def _tuned(folder: str, size: Size, side: Side, lengths: str, options: Any) -> Setting:
    """The setting of a side that is fastest for such lengths, all settings taking turns."""
    base = Setting(side, options.batch, spread=SPREADS[lengths])
    settings = [replace(base, chunks=(rows, rows)) for rows in CHUNKS if rows <= options.batch]
    if side == "sentence-transformers":
        settings += [replace(base, budget=tokens) for tokens in BUDGETS]
    else:
        settings += [replace(base, chunks=chunks) for chunks in SEPARATE if max(chunks) <= options.batch]
    found = alone(measure_in_turns, folder, size, settings, steps=TRIALS, threads=options.threads)
    seconds = [statistics.median(figures["cpu s"]) for figures in found]
    return settings[seconds.index(min(seconds))]


def _rounds(folder: str, size: Size, best: dict[Side, Setting], options: Any) -> Row:
    """Rates of both sides and their ratios: medians over the steps of all rounds."""
    ours, theirs = best.values()
    rounds = _turns(folder, size, [ours, theirs], options)
    for mine, other in rounds:
        if not ours.plain and abs(mine["loss"] - other["loss"]) > SAME * abs(other["loss"]):
            raise AssertionError(
                f"the two sides do not compute the same loss: {mine['loss']} and {other['loss']}"
            )
    return {
        "ours /cpu s": _rate(rounds, 0, ours.batch),
        "theirs /cpu s": _rate(rounds, 1, theirs.batch),
        "ratio": _time_ratio(rounds, "cpu s", 1, 0),
        "by the clock": _time_ratio(rounds, "s", 1, 0),
        "our chunk": _chunk(ours),
        "their chunk": _chunk(theirs),
    }


def _turns(folder: str, size: Size, settings: list[Setting], options: Any) -> list[list[Row]]:
    """Figures of each setting in each round; a round is a process of its own."""
    return [
        alone(measure_in_turns, folder, size, settings, steps=STEPS, threads=options.threads)
        for _ in range(options.rounds)
    ]


def _rate(rounds: list[list[Row]], place: int, batch: int) -> float:
    """Samples a processor second of the setting at `place`."""
    return float(batch / statistics.median(second for one in rounds for second in one[place]["cpu s"]))


def _time_ratio(rounds: list[list[Row]], unit: str, place: int, other: int) -> float:
    """The time of a step of one setting over that of the same step of another one."""
    pairs = (pair for one in rounds for pair in zip(one[place][unit], one[other][unit], strict=True))
    return float(statistics.median(mine / theirs for mine, theirs in pairs))


def _chunk(setting: Setting) -> str:
    if setting.plain:
        return "all"
    queries, documents = setting.chunks
    rows = f"{documents} rows" if queries == documents else f"{queries} and {documents} rows"
    return f"{setting.budget} tokens" if setting.budget else rows


def _memory(folder: str, size: Size, side: Side, batches: tuple[int, ...], options: Any) -> list[Row]:
    """Peak memory of a side, whole and beyond what the process held before its first step."""
    found = []
    for batch in batches:
        settings = [Setting(side, batch)]
        (row,) = alone(measure, folder, size, settings, steps=0, threads=options.threads)
        step = row["peak MB"] - row["before MB"]
        found.append({"side": side, "batch": batch, "peak MB": row["peak MB"], "step MB": step})
    return found


if __name__ == "__main__":
    main()
