"""A tower of Qwen2.5-7B's shape with random weights on one GPU: speed, utilisation, memory.

    python -m benchmarks.gpu --json docs/results/gpu.json        under 10 minutes on an H200
    python -m benchmarks.gpu --dry-run                           the same code on a CPU with a tiny shape

- encode: the document tower forward, in bfloat16
- train lora: both towers on one shared frozen base, an adapter each (ScalingDual)
- train full: all weights of a 7B document tower and a small query tower (ScalingDoc); weights, gradients and
  moments in bfloat16, 56 GB before activations
- queries: what a query costs as an LLM, as a student of 1, 4 or 12 layers, as a mean of a table's rows

The first three with padded and with packed rows. Both kinds of training checkpoint activations and go
through what a run goes through: StageOne and an engine. Tokens are real ones, pads are not counted. MFU: the
operations that real tokens need, repeated passes left out, over the GPU's dense bfloat16 peak. The estimate
beside the measured peak is what `train --dry-run` would count.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_queries
from benchmarks.gpu_towers import DIM, TINY, Figures, any_tokenizer, forget, llm, random_tower, timed
from benchmarks.report import arguments, show, write
from scalingnote.models import backbone, flops, weights
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import collate
from scalingnote.models.config import Lora, Scratch
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.flops import PUBLISHED, Shape, backbone_shape
from scalingnote.models.prompt import Row
from scalingnote.scaling.training_cost import GPUS, tower_bytes
from scalingnote.train import engine
from scalingnote.train.candidates import Triplets
from scalingnote.train.config import Losses, Memory, Optimizer, Ranks, Schedule
from scalingnote.train.objective import StageOne

LORA = Lora(rank=16)
QUERY_TOKENS, DOCUMENT_TOKENS = 24, 256  # means


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--seconds", type=float, help="of each measurement, default: 25; dry run: 0.2")
    parser.add_argument("--rows", type=int, help="triplets of a training step, default: 48; dry run: 4")
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("no GPU here: --dry-run shows that the code works")
    device = torch.device("cpu" if dry else "cuda")
    shape = TINY if dry else PUBLISHED["Qwen/Qwen2.5-7B"]
    seconds = options.seconds or (0.2 if dry else 25.0)
    rows = measure_all(shape, device, seconds=seconds, rows=options.rows or (4 if dry else 48))
    name = "CPU" if dry else torch.cuda.get_device_name()
    show(f"{shape.parameters:,} parameters on {name}", rows)
    metrics = {
        f"{row['work']}_{row['rows']}_{figure}".replace(" ", "_"): row[key]
        for row in rows
        for key, figure in (("tokens/s", "tokens_per_s"), ("MFU", "mfu"), ("peak GB", "peak_gb"))
    }
    queries = gpu_queries.measure_all(shape, device, seconds=seconds / 5)
    show(f"Queries of {gpu_queries.TOKENS} tokens a second, from token ids", queries)
    metrics |= gpu_queries.metrics(queries)
    write(options.json, metrics=metrics, measurements=rows, queries=queries, device=name)


def measure_all(shape: Shape, device: torch.device, *, seconds: float, rows: int) -> list[Figures]:
    """Every measurement, one after the other; memory is given back in between."""
    peak = _peak(device)
    found = []
    for work, measure in (("encode", _encode), ("train lora", _train_lora), ("train full", _train_full)):
        for packed in (False, True):
            forget(device)
            figures = measure(shape, device, packed=packed, seconds=seconds, rows=rows)
            operations = figures.pop("operations")
            found.append(
                {
                    "work": work,
                    "rows": "packed" if packed else "padded",
                    "tokens/s": figures["tokens"] / figures["seconds"],
                    "MFU": operations / figures["seconds"] / peak,
                    "peak GB": _allocated(device) / 1e9,
                    "estimate GB": figures["estimate"] / 1e9,
                    "loss": figures.get("loss", float("nan")),
                }
            )
    return found


def _encode(shape: Shape, device: torch.device, *, packed: bool, seconds: float, rows: int) -> Figures:
    made = random_tower(llm(shape, device), role="document").eval().requires_grad_(False)
    batches = [_documents(shape, 4 * rows, number) for number in range(4)]
    operations = [_forward(shape, batch) for batch in batches]
    inputs = [collate(batch, pad=made.pad, packed=packed).to(device) for batch in batches]

    @torch.inference_mode()
    def work(number: int) -> None:
        made(inputs[number % 4])

    figures = timed(work, device, seconds)
    return (
        figures
        | _totals(figures["steps"], [_tokens(batch) for batch in batches], operations)
        | {"estimate": 2.0 * shape.parameters}
    )


def _train_lora(shape: Shape, device: torch.device, **settings: Any) -> Figures:
    first = llm(shape, device)
    second = Backbone(weights.share_weights(first.model), first.tokenizer, first.causal)
    towers = DualEncoder(
        random_tower(first, role="query", lora=LORA), random_tower(second, role="document", lora=LORA)
    )
    return _train(towers, (shape, shape), device, lora=LORA, **settings)


def _train_full(shape: Shape, device: torch.device, **settings: Any) -> Figures:
    small = Scratch(
        architecture="bert", layers=4, hidden=64 if shape is TINY else 768, heads=4 if shape is TINY else 12
    )
    query = backbone.build(small, tokenizer_json=any_tokenizer().backend_tokenizer.to_str(), seed=0)
    towers = DualEncoder(random_tower(query, role="query"), random_tower(llm(shape, device), role="document"))
    return _train(towers, (backbone_shape(small), shape), device, lora=None, **settings)


def _train(
    towers: DualEncoder,
    shapes: tuple[Shape, Shape],
    device: torch.device,
    *,
    lora: Lora | None,
    packed: bool,
    seconds: float,
    rows: int,
) -> Figures:
    """Steps of the real engine on `rows` triplets with a hard negative each."""
    schedule = Schedule(
        optimizer=Optimizer(peak_lr=1e-6),
        global_batch=rows,
        precision="bfloat16",
        memory=Memory(gradient_checkpointing=True, packing=packed),
        resources=Ranks(workers=1),
    )
    made = engine.build(StageOne(towers, Losses()), schedule=schedule, device=device)
    towers.train()
    queries = [_queries(shapes[0], rows, number, causal=bool(towers.query.causal)) for number in range(4)]
    documents = [_documents(shapes[1], 2 * rows, number) for number in range(4)]
    batches = [
        _triplets(towers, q, d, packed=packed).to(device) for q, d in zip(queries, documents, strict=True)
    ]
    seen: list[float] = []

    def work(number: int) -> None:
        loss, _ = made(batches[number % 4])
        made.backward(loss)
        made.step(1e-6)
        if not seen:
            seen.append(float(loss.detach()))

    def operations(number: int) -> float:
        sides = ((shapes[0], queries[number], 1), (shapes[1], documents[number], 3))
        return sum(
            flops.row(shape, tokens=float(len(row.ids)), pooled=views, dim=DIM, lora=lora).model
            for shape, chosen, views in sides
            for row in chosen
        )

    figures = timed(work, device, seconds)
    tokens = [_tokens(q) + _tokens(d) for q, d in zip(queries, documents, strict=True)]
    parameters = list(towers.parameters())
    state = sum(p.nbytes * (4 if p.requires_grad else 1) for p in parameters)
    activations = sum(
        max(_tokens(rows) for rows in side) * tower_bytes(shape, "bfloat16", checkpointing=True)
        for shape, side in zip(shapes, (queries, documents), strict=True)
    )
    totals = _totals(figures["steps"], tokens, [operations(number) for number in range(4)])
    return figures | totals | {"estimate": float(state + activations), "loss": seen[0]}


def _triplets(
    towers: DualEncoder, queries: Sequence[Row], documents: Sequence[Row], *, packed: bool
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


def _totals(steps: int, tokens: Sequence[int], operations: Sequence[float]) -> Figures:
    return {
        "tokens": sum(tokens[number % 4] for number in range(steps)),
        "operations": sum(operations[number % 4] for number in range(steps)),
    }


def _documents(shape: Shape, rows: int, seed: int) -> list[Row]:
    """Log-normal lengths; three positions are pooled, as in the paper's prompt."""
    rng = np.random.default_rng(seed)
    mean = 32 if shape is TINY else DOCUMENT_TOKENS
    lengths = rng.lognormal(np.log(mean) - 0.08, 0.4, rows).round().clip(16, 512).astype(int)
    ids = (rng.integers(300, shape.vocabulary, length).tolist() for length in lengths)
    return [Row(row, [len(row) // 4, len(row) - 8, len(row) - 1]) for row in ids]


def _queries(shape: Shape, rows: int, seed: int, *, causal: bool) -> list[Row]:
    rng = np.random.default_rng(seed + 1000)
    lengths = rng.lognormal(np.log(QUERY_TOKENS) - 0.08, 0.4, rows).round().clip(4, 64).astype(int)
    ids = (rng.integers(6, min(shape.vocabulary, 200), length).tolist() for length in lengths)
    return [Row(row, [len(row) - 1 if causal else 0]) for row in ids]


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.ids) for row in rows)


def _forward(shape: Shape, rows: Sequence[Row]) -> float:
    return sum(flops.forward(shape, tokens=float(len(row.ids))) for row in rows)


def _peak(device: torch.device) -> float:
    """Dense bfloat16 operations per second: the maker's figure, or what a large product reaches here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        known = next((gpu for label, gpu in GPUS.items() if label in re.findall(r"\w+", name)), None)
        if known:
            return known.peak
    width = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    square = torch.ones(width, width, device=device, dtype=dtype)
    figures = timed(lambda _: _multiply(square), device, 0.2)
    return float(2 * width**3 * figures["steps"] / figures["seconds"])


def _multiply(square: torch.Tensor) -> None:
    square.mm(square)


def _allocated(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0


if __name__ == "__main__":
    main()
