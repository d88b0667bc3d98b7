"""Bytes that training keeps on one GPU: weights, gradients, optimizer state, activations, scores.

Activations are counted tensor by tensor for transformers' layers with fused attention (a test compares them
with what autograd really saves), without dropout masks and the low-rank states of adapters (a few percent).
What a strategy keeps whole, shards or gathers follows from its engine in `train/strategies`.
"""

from dataclasses import dataclass
from typing import Literal

from scalingnote.core import GIB
from scalingnote.models.config import Stored
from scalingnote.models.flops import Shape
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Optimizer, Strategy

# autocast: float32 weights, cast for every matrix product. bfloat16: weights and residual stream.
Numbers = Literal["float32", "autocast", "bfloat16"]
STORED_BYTES = {"int8": 1.0, "nf4": 0.5 + 2 / 64}  # of a frozen weight; nf4 has a scale for 64
# DeepSpeed's own defaults, in elements: weights gathered at once, gradients reduced at once.
MAX_LIVE_PARAMETERS = 1e9
BUCKET_ELEMENTS = 5e8
RUNTIME_BYTES = 1.5 * GIB  # CUDA's context, NCCL's buffers
FRAGMENTATION = 0.05  # share of allocated memory in blocks that the allocator cannot join


def layer_bytes(shape: Shape, numbers: Numbers) -> int:
    """Bytes that autograd keeps of one token in one layer until its backward pass, without recomputation."""
    wide = 4 if numbers == "float32" else 2
    heads = 4 * shape.heads  # log-sum-exp of the softmax
    if not shape.causal:
        # Both norms, the inputs of all matrices, queries, keys, values and the output of attention.
        states, sums = {"float32": (32, 16), "autocast": (24, 16), "bfloat16": (16, 8)}[numbers]
        return states * shape.hidden + 2 * wide * shape.intermediate + heads + sums
    # RMSNorm computes in float32 for every input type; under autocast each matrix also keeps a cast copy.
    states = {"float32": 24, "autocast": 26, "bfloat16": 16}[numbers] * shape.hidden
    attention = 2 * wide * (shape.query_width + shape.kv_width) + heads
    if shape.qk_norm:
        attention += (2 * wide + (0 if wide == 4 else 2)) * (shape.query_width + shape.kv_width)
        attention += 4 * (shape.heads + shape.kv_heads)
    return states + attention + 4 * wide * shape.intermediate + 8


def tower_bytes(shape: Shape, numbers: Numbers, *, checkpointing: bool) -> int:
    """Bytes of one token's activations in all layers at their peak."""
    layer = layer_bytes(shape, numbers)
    residual = (2 if numbers == "bfloat16" else 4) * shape.hidden
    # Gradients of the feed-forward part, the widest in a layer, during its backward pass.
    feed_forward = 3 * (4 if numbers == "float32" else 2) * shape.intermediate
    ends = 3 * residual  # token embeddings, the last norm
    layers = shape.layers * residual + layer if checkpointing else shape.layers * layer
    return layers + feed_forward + ends


@dataclass(frozen=True)
class TrainingState:
    """Bytes on one GPU that do not depend on the batch; `host` bytes are offloaded to the node's memory."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """On the GPU."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def training_state(
    strategy: Strategy,
    optimizer: Optimizer,
    *,
    trained: int,
    frozen: int,
    frozen_tables: int = 0,
    largest: int,
    gpus: int,
    numbers: Numbers,
    base: Stored = "full",
) -> TrainingState:
    """Bytes of weights, gradients and optimizer state on one GPU.

    Args:
        strategy: how they are divided over the GPUs.
        optimizer: AdamW, with moments of 8 bits or of float32.
        trained: parameters that learn.
        frozen: parameters that do not.
        frozen_tables: of them, embeddings, which stay float32 if other frozen weights do not.
        largest: most parameters that are gathered together: a tower's token embeddings and two layers.
        gpus: those of all nodes.
        numbers: what the model computes with.
        base: how frozen linear layers are stored.
    """
    moments = 2 if optimizer.kind == "adamw_8bit" else 8  # bytes per parameter: two numbers
    everything = trained + frozen
    wide = 4 if numbers == "float32" else 2
    stored = STORED_BYTES.get(base, wide) * (frozen - frozen_tables)
    weights = stored + 4.0 * (trained + frozen_tables)
    match strategy:
        case Ddp():
            casts = 2.0 * trained * (numbers == "autocast")  # cached until the step ends
            return TrainingState(weights, 4.0 * trained, float(moments * trained), casts)
        case Fsdp2(reshard=reshard, offload=offload):
            shares = (weights / gpus, 4.0 * trained / gpus, moments * trained / gpus)
            whole = largest if reshard else everything
            gathered = (wide * whole + 4.0 * min(largest, trained)) * (gpus > 1)
            if offload:
                return TrainingState(0.0, 0.0, 0.0, gathered, host=sum(shares))
            return TrainingState(*shares, gathered)
        case DeepSpeed(stage=stage, offload=offload):
            weights = float(wide * everything) / (gpus if stage == 3 else 1)
            copy = 4 if wide == 2 else 0  # float32 master weights beside the bfloat16 ones
            moved = (copy + moments + 4.0) * trained / gpus  # to the host, where the optimizer steps
            whole_gradients = float(wide * trained) if stage == 1 else 0.0
            gathered = 4.0 * min(BUCKET_ELEMENTS, trained)
            if stage == 3:
                gathered += wide * min(MAX_LIVE_PARAMETERS, everything)
                if offload:
                    return TrainingState(0.0, 0.0, 0.0, gathered, host=moved + weights)
            if offload:
                return TrainingState(weights, whole_gradients, 0.0, gathered, host=moved)
            gradients = whole_gradients + 4.0 * trained / gpus
            return TrainingState(weights, gradients, (copy + moments) * trained / gpus, gathered)


def score_bytes(
    *, rows: int, ranks: int, columns: int, views: int, prefixes: tuple[int, ...], dim: int
) -> float:
    """Bytes of the loss: embeddings of all ranks, their prefixes, and one score matrix of this GPU's rows.

    Each matrix is freed before the next view or prefix allocates its own; only gradients of embeddings
    remain.

    Args:
        rows: queries of this GPU in a step.
        ranks: GPUs of all nodes.
        columns: candidates that a query adds, its positive and its negatives.
        views: embeddings of a document.
        prefixes: Matryoshka dimensions.
        dim: dimensions of a whole embedding.
    """
    everywhere = rows * ranks * (columns * views + 1)
    # Of each prefix: the normalized copy, its accumulated gradient, and the gradient in flight.
    embeddings = 4.0 * everywhere * (dim + 3 * sum(prefixes))
    pairs = float(rows * rows * ranks * columns)
    return embeddings + 2 * 4.0 * pairs + 2.0 * pairs
