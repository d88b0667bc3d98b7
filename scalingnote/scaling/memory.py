"""Memory of one GPU in training: weights, gradients, optimizer state, what is gathered, scores of the loss.

What a strategy keeps whole, shards or gathers follows from its engine in `train/strategies`.
"""

from dataclasses import dataclass

from scalingnote.scaling.activations import Numbers
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Optimizer, Strategy

# DeepSpeed's own defaults, in elements: weights gathered at once, gradients reduced at once.
LIVE_PARAMETERS = 1e9
BUCKET = 5e8


@dataclass(frozen=True)
class State:
    """Bytes on one GPU that do not depend on the batch; `host` lies in the node's memory instead."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """On the GPU."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def state(
    strategy: Strategy,
    optimizer: Optimizer,
    *,
    trained: int,
    frozen: int,
    frozen_tables: int = 0,
    largest: int,
    gpus: int,
    numbers: Numbers,
) -> State:
    """Of `trained` and `frozen` parameters over `gpus`.

    `frozen_tables` of the frozen ones are embeddings: float32 also where other frozen weights are not.
    `largest` is the most parameters that are gathered together: a tower's token embeddings and two layers.
    """
    moments = 2 if optimizer.kind == "adamw_8bit" else 8  # bytes per parameter: two numbers
    everything = trained + frozen
    wide = 4 if numbers == "float32" else 2
    match strategy:
        case Ddp():
            held = wide * (frozen - frozen_tables) + 4.0 * (trained + frozen_tables)
            casts = 2.0 * trained if numbers == "autocast" else 0.0  # autocast keeps them until it ends
            return State(held, 4.0 * trained, float(moments * trained), casts)
        case Fsdp2(reshard=reshard, offload=offload):
            shares = (4.0 * everything / gpus, 4.0 * trained / gpus, moments * trained / gpus)
            whole = largest if reshard else everything
            gathered = (wide * whole + 4.0 * min(largest, trained)) * (gpus > 1)
            if offload:
                return State(0.0, 0.0, 0.0, gathered, host=sum(shares))
            return State(*shares, gathered)
        case DeepSpeed():
            return _zero(strategy, moments, trained=trained, everything=everything, gpus=gpus, wide=wide)


def _zero(config: DeepSpeed, moments: int, *, trained: int, everything: int, gpus: int, wide: int) -> State:
    copy = 4 if wide == 2 else 0  # float32 weights beside those that are multiplied
    weights = float(wide * everything) / (gpus if config.stage == 3 else 1)
    optimizer = (copy + moments) * trained / gpus
    gradients = 4.0 * trained / gpus + (float(wide * trained) if config.stage == 1 else 0.0)
    gathered = 4.0 * min(BUCKET, trained)
    if config.stage == 3:
        gathered += wide * min(LIVE_PARAMETERS, everything)
    host = 0.0
    if config.offload_optimizer:  # the step is taken where the moments are
        shard = 4.0 * trained / gpus
        host, optimizer, gradients = optimizer + shard, 0.0, gradients - shard
    if config.offload_parameters and config.stage == 3:
        host, weights = host + weights, 0.0
    return State(weights, gradients, optimizer, gathered, host)


def scores(
    *, rows: int, ranks: int, columns: int, views: int, prefixes: tuple[int, ...], dim: int, masked: bool
) -> float:
    """Of the loss: embeddings of all ranks, their prefixes, and one matrix of this GPU's rows against them.

    A matrix is gone before the next view or prefix makes its own: only the gradients of embeddings are kept.
    """
    everywhere = rows * ranks * (columns * views + 1)
    # Each prefix at unit length, the gradient kept for it, and the gradient that passes through.
    embeddings = 4.0 * everywhere * (dim + 3 * sum(prefixes))
    pairs = float(rows * rows * ranks * columns)
    return embeddings + 2 * 4.0 * pairs + (2.0 * pairs if masked else 0.0)
