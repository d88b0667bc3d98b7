"""The memory table of docs/guides/train.md, from the published config: `python tests/training_tables.py`.

It is between ``<!-- name -->`` and ``<!-- /name -->``; a test compares it with the table of this module.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from scalingnote.core import GIB
from scalingnote.core.config import load
from scalingnote.plan.config import Assumptions
from scalingnote.plan.training_cost import estimate
from scalingnote.run.config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "configs/paper/scalingnote.yaml"
# (what, GPUs, overrides of the published run); batch 512 divides over all of them.
ZERO_3 = "strategy={kind: deepspeed, stage: 3}"
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("LoRA on a shared base, `ddp`", 8, ("strategy.kind=ddp", "query.lora.rank=16", "document.lora.rank=16")),
    *(
        (
            f"the same, its base in {base}",
            8,
            (
                "strategy.kind=ddp",
                *(f"{side}.lora={{rank: 16, base: {base}}}" for side in ("query", "document")),
            ),
        )
        for base in ("int8", "nf4")
    ),
    ("all weights, `ddp`", 8, ("strategy.kind=ddp",)),
    ("all weights, ZeRO-1", 8, ("strategy={kind: deepspeed, stage: 1}",)),
    ("all weights, ZeRO-2", 8, ("strategy={kind: deepspeed, stage: 2}",)),
    ("all weights, ZeRO-3", 8, (ZERO_3,)),
    ("all weights, `fsdp2`", 8, ()),
    ("`fsdp2`, offloaded", 8, ("strategy.offload=true",)),
    ("ZeRO-3, 8-bit moments", 8, (ZERO_3, "optimizer.kind=adamw_8bit")),
    ("`fsdp2`, no checkpointing", 64, ("memory.gradient_checkpointing=false",)),
    ("`fsdp2`", 64, ()),
    ("ZeRO-3", 64, (ZERO_3,)),
    ("ZeRO-3, batch 65,536", 64, (ZERO_3, "global_batch=65536")),
    (
        "ZeRO-3, batch 65,536, GradCache",
        64,
        (ZERO_3, "global_batch=65536", "memory.grad_cache={query_rows: 128, document_rows: 32}"),
    ),
)


def memory() -> str:
    """Format the memory of one H100 in the published run with other strategies, as the dry run counts it."""
    head = (
        "case",
        "GPUs",
        "weights",
        "gradients",
        "optimizer",
        "gathered",
        "activations",
        "scores",
        "together",
        "fits 79",
    )
    lines = [head, ("---", *["--:"] * (len(head) - 1))]
    for name, gpus, overrides in CASES:
        knobs = ["global_batch=512", *overrides, f"resources.workers={gpus}"]
        config = load(RunConfig, [PAPER], [f"train.{knob}" for knob in knobs])
        cost = estimate(config.train, Assumptions())
        state = cost.state
        sizes = (
            state.weights,
            state.gradients,
            state.optimizer,
            state.gathered,
            cost.activations,
            cost.scores,
        )
        cells = [f"{size / GIB:,.1f}" for size in (*sizes, cost.memory)]
        lines.append((name, str(gpus), *cells, "yes" if cost.fits else "no"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {"docs/guides/train.md": {"memory": memory}}


def renewed(page: str) -> str:
    """Return the text of a page with new tables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in PAGES[page].items():
        first, last = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(first)
        _, closing, after = rest.partition(last)
        assert closing, f"{page} has no place for {name}"
        text = before + first + table() + last + after
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), encoding="utf-8")
        sys.stdout.write(f"{page} renewed\n")
