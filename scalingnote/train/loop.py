"""The training loop of one rank: batches by step in, trained weights out. It knows no Ray and no paths
but its checkpoints'; both stages train through it.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scalingnote.errors import TrainingError
from scalingnote.log import Progress, get_logger
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Optimizer
from scalingnote.train.distributed import rank, world_size

NOTE_EVERY = 10


def fit(
    module: nn.Module,
    batch_at: Callable[[int], Any],
    *,
    steps: int,
    rows_per_step: int,
    settings: Optimizer,
    checkpoints: Checkpoints,
    checkpoint_every: int,
    dtype: torch.dtype,
    seed: int,
    room: str,
) -> list[dict[str, Any]]:
    """Train `module` (whose forward gives a loss and its parts) for `steps`, resuming where it stopped.

    Returns the loss curve. TrainingError when the loss or the gradient is not finite. Dropout is seeded
    by (seed, step, rank), so a resumed run repeats what an uninterrupted one would have drawn.
    """
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=settings.peak_lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=True,
    )
    start, curve = checkpoints.restore(module, optimizer)
    if start:
        get_logger(room).info("resuming at step %d of %d", start, steps)
    wrapped = DistributedDataParallel(module) if world_size() > 1 else module
    device = next(module.parameters()).device
    module.train()
    with (
        Progress(room, total=steps * rows_per_step, done=start * rows_per_step, unit="rows") as progress,
        ThreadPoolExecutor(1) as ahead,
    ):
        following = ahead.submit(batch_at, start) if start < steps else None
        for step in range(start, steps):
            assert following is not None
            batch = following.result()
            following = ahead.submit(batch_at, step + 1) if step + 1 < steps else None
            rate = _learning_rate(step, steps=steps, settings=settings)
            for group in optimizer.param_groups:
                group["lr"] = rate
            torch.manual_seed((seed * 1_000_003 + step) * 4_099 + rank())
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss, parts = wrapped(batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), settings.clip)
            note = {"loss": loss.detach(), "gradient_norm": norm, **parts}
            _guard(note, step=step)
            optimizer.step()
            if step % NOTE_EVERY == 0 or step + 1 == steps:
                curve.append({"step": step, "lr": rate, **{k: round(float(v), 6) for k, v in note.items()}})
            progress.advance(rows_per_step, f"loss {note['loss']:.4f}")
            if (step + 1) % checkpoint_every == 0 and step + 1 < steps and rank() == 0:
                checkpoints.save(step + 1, module, optimizer, curve)
    module.eval()
    return curve


def _learning_rate(step: int, *, steps: int, settings: Optimizer) -> float:
    """Linear from 0 to the peak over the warm-up, then linear to 0 (appendix A)."""
    warmup = max(round(steps * settings.warmup), 1)
    if step < warmup:
        return settings.peak_lr * (step + 1) / warmup
    return settings.peak_lr * (steps - step) / max(steps - warmup, 1)


def _guard(note: dict[str, Tensor], *, step: int) -> None:
    if not all(math.isfinite(value) for value in note.values()):
        found = ", ".join(f"{name} {float(value):g}" for name, value in note.items())
        raise TrainingError(
            f"step {step} is not finite ({found}): lower optimizer.peak_lr or raise losses.temperature; "
            "the last checkpoint before it is kept"
        )
