"""A tower of Qwen2.5-7B's shape with random weights on one GPU: speed, utilisation, memory.

    python -m benchmarks.gpu --json docs/results/gpu.json        at most eight minutes
    python -m benchmarks.gpu --dry-run                           the same code on a CPU with a tiny shape

It needs torch 2.11 or newer and no download. Each measurement runs in a separate process. Its result, or the
reason of its failure, is saved when it ends.

- encode: the document tower's forward pass, in bfloat16; compiled: its layers by torch.compile, on a GPU
- train lora: both towers on one shared frozen base, with one adapter each (ScalingDual); the base in full
  precision, in 8 bits and, with bitsandbytes, in 4
- train full: all weights of a 7B document tower and a small query tower (ScalingDoc); weights, gradients and
  moments in bfloat16, 56 GB before activations; by ddp, and by fsdp2 on one rank
- train student: stage II, a student of 4 layers on stored embeddings
- engines: the same document tower with each engine of the stage encode (gpu_engines.py)
- queries: cost of a query with an LLM, a student of 1, 4 or 12 layers, or a mean of a table's rows

Measurements without further words run with padded and with packed rows. All trainings except the student's
checkpoint activations, and run like a stage, with its losses and an engine. Tokens are real ones, without
pads. MFU: the operations that real tokens need, without repeated passes, over the GPU's dense bfloat16 peak.
The estimate next to the measured peak is that of `scalingnote run --dry-run`.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import gpu_engines, gpu_queries
from benchmarks.gpu_towers import (
    DIM,
    TINY,
    Figures,
    allocated,
    any_tokenizer,
    document_rows,
    forget,
    llm,
    peak_rate,
    query_rows,
    random_tower,
    timed,
    tokens,
)
from benchmarks.report import arguments, show, write
from scalingnote.core.log import get_logger
from scalingnote.models import backbone, flops, weights
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import collate
from scalingnote.models.config import Lora, Pretrained, Scratch, Stored
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.flops import Shape, backbone_shape
from scalingnote.models.prompt import TokenRow
from scalingnote.models.tower import Tower
from scalingnote.plan.memory import tower_bytes
from scalingnote.train import engine, strategies
from scalingnote.train.config import Ddp, Fsdp2, Losses, Memory, Optimizer, Ranks, Schedule
from scalingnote.train.distillation.config import DistillLosses
from scalingnote.train.distillation.objective import Lesson, StageTwo
from scalingnote.train.engine import Objective
from scalingnote.train.objective import StageOne, Triplets

OTHERS = {"engines": gpu_engines.metrics, "queries": gpu_queries.metrics}
FIRST = (  # a slow machine may finish only these in eight minutes
    "encode packed",
    "encode padded",
    "encode compiled packed",
    "train lora packed",
    "train full packed",
    "train student packed",
)
MIN_LEFT_S = 20.0  # of the total time, to begin another measurement
BATCHES = 4  # different ones, in turn
STUDENT_ROWS = 64  # lessons of a step, for each triplet of a training step
NOTHING: Figures = dict.fromkeys(("tokens", "seconds", "operations", "estimate"), math.nan)
Work = Callable[..., Figures]
log = get_logger("gpu")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--seconds", type=float, help="of each measurement, default: 10; dry run: 0.2")
    parser.add_argument("--rows", type=int, help="triplets of a training step, default: 48; dry run: 4")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all; the rest is not started")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these measurements")
    parser.add_argument("--into", help=argparse.SUPPRESS)  # result file of a process with one measurement
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("no GPU here: --dry-run shows that the code works")
    device = torch.device("cpu" if dry else "cuda")
    known = measurements(
        device, dry=dry, seconds=options.seconds or (0.2 if dry else 10.0), rows=options.rows
    )
    if unknown := sorted(set(options.only or ()) - set(known)):
        parser.error(f"no measurement {unknown}; there are {list(known)}")
    if options.into:
        (name,) = options.only
        Path(options.into).write_text(json.dumps(known[name]()), encoding="utf-8")
        return
    run_all(list(options.only or known), options, "CPU" if dry else torch.cuda.get_device_name())


def measurements(
    device: torch.device, *, dry: bool, seconds: float, rows: int | None
) -> dict[str, Callable[[], list[Figures]]]:
    """Return every measurement by name, the most important first; each returns the rows of a table."""
    shape = TINY if dry else backbone_shape(Pretrained(path="Qwen/Qwen2.5-7B"))
    small = TINY if dry else backbone_shape(Pretrained(path="Qwen/Qwen2.5-1.5B"))
    rows = rows or (4 if dry else 48)
    towers: dict[str, Callable[[], list[Figures]]] = {}
    for work, (_, packings) in kinds(device).items():
        for packed in reversed(packings):
            name = f"{work} {'packed' if packed else 'padded'}"
            towers[name] = partial(measure, work, shape, device, packed=packed, seconds=seconds, rows=rows)
    others = {
        "engines": partial(gpu_engines.measure_all, small, device, seconds=seconds),
        "queries": partial(gpu_queries.measure_all, shape, device, seconds=seconds / 2),
    }
    first = [name for name in FIRST if name in towers | others]
    works = towers | others
    return {name: works[name] for name in [*first, *(name for name in works if name not in first)]}


def run_all(names: Sequence[str], options: argparse.Namespace, device: str) -> None:
    """Run each measurement in a separate process, so that a failure or timeout does not affect the others."""
    deadline = time.monotonic() + options.minutes * 60
    tables: dict[str, Any] = {}  # a list of Figures each
    problems: dict[str, str] = {}
    for name in names:
        remaining_s = deadline - time.monotonic()
        rows, problem = (
            _in_process(name, options, remaining_s) if remaining_s > MIN_LEFT_S else ([], "no time was left")
        )
        table = name if name in OTHERS else "towers"
        tables[table] = tables.get(table, []) + rows
        if problem:
            problems[name] = problem
            log.warning("%s: %s", name, problem)
        else:
            show(f"{name} on {device}", rows)
        figures: dict[str, float] = {}
        for part, measured in tables.items():
            if measured:
                figures |= OTHERS.get(part, metrics)(measured)
        # Finished measurements are saved even if a later one fails.
        write(options.json, metrics=figures, **tables, problems=problems, device=device)


def _in_process(name: str, options: argparse.Namespace, timeout: float) -> tuple[list[Figures], str]:
    """Run one measurement; return its rows and the reason if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks.gpu", "--only", name, "--into", str(into)]
        command += ["--dry-run"] * options.dry_run
        for knob in ("seconds", "rows"):
            if (value := getattr(options, knob)) is not None:
                command += [f"--{knob}", str(value)]
        try:
            process = subprocess.run(command, timeout=timeout, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return [], f"not done in {timeout:.0f} s"
        if process.returncode:
            error_lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
            return [], f"exit code {process.returncode}: {error_lines[-1][:200] if error_lines else ''}"
        rows: list[Figures] = json.loads(into.read_text(encoding="utf-8"))
        return rows, ""


def metrics(rows: list[Figures]) -> dict[str, float]:
    """Return rates, utilisation and memory by work, packing and figure."""
    return {
        f"{row['work']}_{row['rows']}_{figure}".replace(" ", "_"): row[key]
        for row in rows
        for key, figure in (("tokens/s", "tokens_per_s"), ("MFU", "mfu"), ("peak GB", "peak_gb"))
        if row["error"] == ""
    }


def kinds(device: torch.device) -> dict[str, tuple[Work, tuple[bool, ...]]]:
    """Return the works by name, and whether to measure them with padded rows, packed rows, or both."""
    both, packed = (False, True), (True,)
    works: dict[str, tuple[Work, tuple[bool, ...]]] = {
        "encode": (_encode, both),
        "train lora": (_train_lora, both),
        "train lora int8": (partial(_train_lora, base="int8"), packed),
        "train full": (_train_full, both),
        "train full fsdp2": (partial(_train_full, strategy=Fsdp2()), packed),
        "train student": (_train_student, packed),
    }
    if device.type == "cuda":
        works["encode compiled"] = partial(_encode, compiled=True), packed
    if importlib.util.find_spec("bitsandbytes"):
        works["train lora nf4"] = partial(_train_lora, base="nf4"), packed
    return works


def measure(
    work: str, shape: Shape, device: torch.device, *, packed: bool, seconds: float, rows: int
) -> list[Figures]:
    """Measure a tower; the row of a failure has the reason, for example memory or a missing kernel."""
    peak = peak_rate(device)
    forget(device)
    figures, error = NOTHING, ""
    try:
        figures = kinds(device)[work][0](shape, device, packed=packed, seconds=seconds, rows=rows)
    except Exception as failure:
        log.exception("%s", work)
        error = _first_line(failure)
    return [
        {
            "work": work,
            "rows": "packed" if packed else "padded",
            "tokens/s": figures["tokens"] / figures["seconds"],
            "MFU": figures["operations"] / figures["seconds"] / peak,
            "peak GB": allocated(device) / 1e9,
            "estimate GB": figures["estimate"] / 1e9,
            "loss": figures.get("loss", math.nan),
            "error": error,
        }
    ]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def _encode(
    shape: Shape, device: torch.device, *, packed: bool, seconds: float, rows: int, compiled: bool = False
) -> Figures:
    tower = random_tower(llm(shape, device), role="document").eval().requires_grad_(False)
    if compiled:
        for layer in engine.layers(tower.backbone):
            layer.compile(dynamic=True)
    batches = [document_rows(shape, 4 * rows, number) for number in range(BATCHES)]
    operations = [sum(flops.forward(shape, tokens=float(len(row.ids))) for row in batch) for batch in batches]
    inputs = [collate(batch, pad=tower.pad, packed=packed).to(device) for batch in batches]

    @torch.inference_mode()
    def work(number: int) -> None:
        tower(inputs[number % BATCHES])

    figures = timed(work, device, seconds)
    totals = _totals(figures["steps"], [tokens(batch) for batch in batches], operations)
    return figures | totals | {"estimate": 2.0 * shape.parameters}


def _train_lora(shape: Shape, device: torch.device, *, base: Stored = "full", **settings: Any) -> Figures:
    lora = Lora(rank=16, base=base)
    first = llm(shape, device)
    weights.store_base(first.model.requires_grad_(False), base)
    second = Backbone(weights.share_weights(first.model), first.tokenizer, first.causal)
    towers = DualEncoder(
        random_tower(first, role="query", lora=lora), random_tower(second, role="document", lora=lora)
    )
    return _train_towers(towers, (shape, shape), device, lora=lora, **settings)


def _train_full(
    shape: Shape, device: torch.device, *, strategy: Ddp | Fsdp2 | None = None, **settings: Any
) -> Figures:
    small = _small_backbone(shape)
    query = backbone.build(small, tokenizer_json=any_tokenizer().backend_tokenizer.to_str(), seed=0)
    towers = DualEncoder(random_tower(query, role="query"), random_tower(llm(shape, device), role="document"))
    try:
        sizes = (backbone_shape(small), shape)
        return _train_towers(towers, sizes, device, lora=None, strategy=strategy or Ddp(), **settings)
    finally:
        if dist.is_initialized():  # by the engine
            dist.destroy_process_group()


def _train_student(shape: Shape, device: torch.device, *, packed: bool, seconds: float, rows: int) -> Figures:
    """Run steps of stage II: queries, and stored embeddings as targets of a student of 4 layers."""
    small = _small_backbone(shape)
    size = backbone_shape(small)
    small_backbone = backbone.build(small, tokenizer_json=any_tokenizer().backend_tokenizer.to_str(), seed=0)
    student = random_tower(small_backbone, role="query")
    chosen = [query_rows(size, STUDENT_ROWS * rows, number, causal=False) for number in range(BATCHES)]
    lessons = [
        Lesson(collate(batch, pad=student.pad, packed=packed), torch.randn(len(batch), DIM)).to(device)
        for batch in chosen
    ]
    operations = [_training(size, batch, pooled=1, lora=None) for batch in chosen]
    figures = _steps(
        StageTwo(student, DistillLosses()),
        lessons,
        device,
        memory=Memory(),
        rows=STUDENT_ROWS * rows,
        seconds=seconds,
    )
    totals = _totals(figures["steps"], [tokens(batch) for batch in chosen], operations)
    activations = max(map(tokens, chosen)) * tower_bytes(size, "autocast", checkpointing=False)
    return figures | totals | {"estimate": _state(student) + activations}


def _train_towers(
    towers: DualEncoder,
    shapes: tuple[Shape, Shape],
    device: torch.device,
    *,
    lora: Lora | None,
    packed: bool,
    seconds: float,
    rows: int,
    strategy: Ddp | Fsdp2 | None = None,
) -> Figures:
    """Run steps of stage I on `rows` triplets with one hard negative each."""
    causal = bool(towers.query.causal)
    queries = [query_rows(shapes[0], rows, number, causal=causal) for number in range(BATCHES)]
    documents = [document_rows(shapes[1], 2 * rows, number) for number in range(BATCHES)]
    batches = [
        _triplets(towers, q, d, packed=packed).to(device) for q, d in zip(queries, documents, strict=True)
    ]
    state = _state(towers)  # before fsdp2 shards it
    figures = _steps(
        StageOne(towers, Losses()),
        batches,
        device,
        memory=Memory(gradient_checkpointing=True),
        rows=rows,
        seconds=seconds,
        strategy=strategy,
    )
    operations = [
        _training(shapes[0], q, pooled=1, lora=lora) + _training(shapes[1], d, pooled=3, lora=lora)
        for q, d in zip(queries, documents, strict=True)
    ]
    activations = sum(
        max(map(tokens, side)) * tower_bytes(shape, "bfloat16", checkpointing=True)
        for shape, side in zip(shapes, (queries, documents), strict=True)
    )
    both = [tokens(q) + tokens(d) for q, d in zip(queries, documents, strict=True)]
    totals = _totals(figures["steps"], both, operations)
    return figures | totals | {"estimate": state + activations}


def _steps(
    module: Objective,
    batches: Sequence[Any],
    device: torch.device,
    *,
    memory: Memory,
    rows: int,
    seconds: float,
    strategy: Ddp | Fsdp2 | None = None,
) -> Figures:
    """Run steps with the engine of a run; return the figures and the first loss."""
    schedule = Schedule(
        optimizer=Optimizer(peak_lr=1e-6),
        global_batch=rows,
        precision="bfloat16",
        memory=memory,
        strategy=strategy,
        resources=Ranks(workers=1),
    )
    trained = strategies.build(module, schedule=schedule, device=device)
    module.train()
    first_loss: list[float] = []

    def work(number: int) -> None:
        loss, _ = trained(batches[number % BATCHES])
        trained.backward(loss)
        trained.step(1e-6)
        if not first_loss:
            first_loss.append(float(loss.detach()))

    return timed(work, device, seconds) | {"loss": first_loss[0]}


def _triplets(
    towers: DualEncoder, queries: Sequence[TokenRow], documents: Sequence[TokenRow], *, packed: bool
) -> Triplets:
    rows = len(queries)
    ids = torch.arange(2 * rows)
    return Triplets(
        queries=collate(queries, pad=towers.query.pad, packed=packed),
        documents=collate(documents, pad=towers.document.pad, packed=packed),
        query_ids=ids[:rows],
        document_ids=ids,
        known_positives=ids[:rows, None],
        weights=torch.ones(rows),
    )


def _small_backbone(shape: Shape) -> Scratch:
    tiny = shape is TINY
    return Scratch(
        architecture="bert", layers=1 if tiny else 4, hidden=64 if tiny else 768, heads=4 if tiny else 12
    )


def _training(shape: Shape, rows: Sequence[TokenRow], *, pooled: int, lora: Lora | None) -> float:
    """Count the operations of training on these rows."""
    works = (flops.row(shape, tokens=float(len(row.ids)), pooled=pooled, dim=DIM, lora=lora) for row in rows)
    return sum(work.model for work in works)


def _state(module: DualEncoder | Tower) -> float:
    """Count the bytes of weights, and of a gradient and two moments of each trained weight."""
    return float(sum(p.nbytes * (4 if p.requires_grad else 1) for p in module.parameters()))


def _totals(steps: int, tokens: Sequence[int], operations: Sequence[float]) -> Figures:
    return {
        "tokens": sum(tokens[number % BATCHES] for number in range(steps)),
        "operations": sum(operations[number % BATCHES] for number in range(steps)),
    }


if __name__ == "__main__":
    main()
