"""A tower of Qwen2.5-7B's shape with random weights on one GPU: speed, utilisation, memory.

    python -m benchmarks.gpu --json docs/results/gpu.json        a few minutes
    python -m benchmarks.gpu --dry-run                           the same code on a CPU with a tiny shape

It needs torch 2.11 or newer and no download. Each measurement runs in a process of its own and is saved as it
ends, with the reason if it failed.

- encode: the document tower forward, in bfloat16
- train lora: steps of both towers on one shared frozen base, an adapter each (ScalingDual), with activation
  checkpointing, a stage's losses and an engine
- queries: what a query costs as an LLM, as a student of 1, 4 or 12 layers, as a mean of a table's rows

Tokens are real ones, pads are not counted. MFU: the operations that real tokens need, repeated passes left
out, over the GPU's dense bfloat16 peak. The estimate next to the measured peak is what
`scalingnote run --dry-run` would count.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import gpu_queries
from benchmarks.gpu_towers import (
    DIM,
    TINY,
    Figures,
    allocated,
    document_rows,
    forget,
    llm,
    peak_rate,
    query_rows,
    random_tower,
    timed,
    tokens,
)
from benchmarks.report import arguments, run_isolated, show, write
from scalingnote.core.log import get_logger
from scalingnote.models import flops, weights
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import collate
from scalingnote.models.config import Lora
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.flops import PUBLISHED_SHAPES, Shape
from scalingnote.models.prompt import TokenRow
from scalingnote.plan.training_cost import tower_bytes
from scalingnote.train import strategies
from scalingnote.train.config import Losses, Memory, Optimizer, Ranks, Schedule
from scalingnote.train.objective import StageOne, Triplets

BATCHES = 4  # different ones, in turn
ROWS, DRY_ROWS = 48, 4  # triplets of a training step; four times as many documents of a forward pass
LORA = Lora(rank=16)
log = get_logger("gpu")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each, default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=[*MEASUREMENTS], metavar="NAME")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no GPU here: --dry-run shows that the code works")
    device = "CPU" if options.dry_run else torch.cuda.get_device_name()
    tables: dict[str, Any] = {"towers": [], "queries": []}
    problems: dict[str, str] = {}
    for name in options.only:
        try:
            rows = run_isolated(MEASUREMENTS[name], dry=options.dry_run, seconds=options.seconds)
        except Exception as failure:  # too little memory, a missing kernel: the others go on
            log.exception("%s", name)
            problems[name] = f"{type(failure).__name__}: {failure}".splitlines()[0]
        else:
            show(f"{name} on {device}", rows)
            tables["queries" if name == "queries" else "towers"] += rows
        found = tower_metrics(tables["towers"]) | gpu_queries.metrics(tables["queries"])
        # What is measured stays, whatever comes.
        write(options.json, metrics=found, **tables, problems=problems, device=device)


def tower_metrics(rows: Sequence[Figures]) -> dict[str, float]:
    """Rates, utilisation and memory by work, packing and figure."""
    return {
        f"{row['work']}_{row['rows']}_{figure}".replace(" ", "_"): row[key]
        for row in rows
        for key, figure in (("tokens/s", "tokens_per_s"), ("MFU", "mfu"), ("peak GB", "peak_gb"))
    }


def measure(name: str, *, packed: bool, dry: bool, seconds: float) -> list[Figures]:
    """The row of `encode` or `train lora`."""
    device = torch.device("cpu" if dry else "cuda")
    shape = TINY if dry else PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    peak = peak_rate(device)
    forget(device)
    work = encode if name == "encode" else train_lora
    figures = work(shape, device, DRY_ROWS if dry else ROWS, packed=packed, seconds=seconds)
    return [
        {
            "work": name,
            "rows": "packed" if packed else "padded",
            "tokens/s": figures["tokens"] / figures["seconds"],
            "MFU": figures["operations"] / figures["seconds"] / peak,
            "peak GB": allocated(device) / 1e9,
            "estimate GB": figures["estimate"] / 1e9,
            "loss": figures.get("loss"),
        }
    ]


def measure_queries(*, dry: bool, seconds: float) -> list[Figures]:
    """A row for each query tower."""
    device = torch.device("cpu" if dry else "cuda")
    shape = TINY if dry else PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"]
    return gpu_queries.measure_all(shape, device, seconds=seconds / 2)


# What matters most comes first: a device may be lent for minutes.
MEASUREMENTS: dict[str, Callable[..., list[Figures]]] = {
    **{
        f"encode {rows}": partial(measure, "encode", packed=rows == "packed") for rows in ("packed", "padded")
    },
    "train lora packed": partial(measure, "train lora", packed=True),
    "queries": measure_queries,
    "train lora padded": partial(measure, "train lora", packed=False),
}


def encode(shape: Shape, device: torch.device, rows: int, *, packed: bool, seconds: float) -> Figures:
    """Forward passes of a document tower."""
    made = random_tower(llm(shape, device), role="document").eval().requires_grad_(False)
    batches = [document_rows(shape, 4 * rows, number) for number in range(BATCHES)]
    operations = [sum(flops.forward(shape, tokens=float(len(row.ids))) for row in batch) for batch in batches]
    inputs = [collate(batch, pad=made.pad, packed=packed).to(device) for batch in batches]

    @torch.inference_mode()
    def work(number: int) -> None:
        made(inputs[number % BATCHES])

    figures = timed(work, device, seconds)
    totals = _totals(figures["steps"], [tokens(batch) for batch in batches], operations)
    return figures | totals | {"estimate": 2.0 * shape.parameters}


def train_lora(shape: Shape, device: torch.device, rows: int, *, packed: bool, seconds: float) -> Figures:
    """Steps of stage I on `rows` triplets with a hard negative each; with the first loss."""
    first = llm(shape, device)
    first.model.requires_grad_(False)
    second = Backbone(weights.share_weights(first.model), first.tokenizer, first.causal)
    towers = DualEncoder(
        random_tower(first, role="query", lora=LORA), random_tower(second, role="document", lora=LORA)
    )
    queries = [query_rows(shape, rows, number) for number in range(BATCHES)]
    documents = [document_rows(shape, 2 * rows, number) for number in range(BATCHES)]
    pairs = list(zip(queries, documents, strict=True))
    batches = [_triplets(towers, q, d, packed=packed).to(device) for q, d in pairs]
    schedule = Schedule(
        optimizer=Optimizer(peak_lr=1e-6),
        global_batch=rows,
        precision="bfloat16",
        memory=Memory(gradient_checkpointing=True),
        resources=Ranks(workers=1),
    )
    made = strategies.build(StageOne(towers, Losses()), schedule=schedule, device=device)
    towers.train()
    losses: list[Any] = []

    def work(number: int) -> None:
        loss, _ = made(batches[number % BATCHES])
        made.backward(loss)
        made.step(1e-6)
        losses.append(loss.detach())

    figures = timed(work, device, seconds) | {"loss": float(losses[0])}
    operations = [_training(shape, q, pooled=1) + _training(shape, d, pooled=3) for q, d in pairs]
    totals = _totals(figures["steps"], [tokens(q) + tokens(d) for q, d in pairs], operations)
    most = max(map(tokens, queries)) + max(map(tokens, documents))
    activations = most * tower_bytes(shape, "bfloat16", checkpointing=True)
    # A weight that learns has a gradient and two moments.
    state = sum(p.nbytes * (4 if p.requires_grad else 1) for p in towers.parameters())
    return figures | totals | {"estimate": float(state + activations)}


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


def _training(shape: Shape, rows: Sequence[TokenRow], *, pooled: int) -> float:
    """Operations that training on these rows needs."""
    works = (flops.row(shape, tokens=float(len(row.ids)), pooled=pooled, dim=DIM, lora=LORA) for row in rows)
    return sum(work.model for work in works)


def _totals(steps: int, tokens: Sequence[int], operations: Sequence[float]) -> Figures:
    return {
        "tokens": sum(tokens[number % BATCHES] for number in range(steps)),
        "operations": sum(operations[number % BATCHES] for number in range(steps)),
    }


if __name__ == "__main__":
    main()
