"""Bytes that training keeps on one GPU: weights, gradients, optimizer state, activations, scores.

Activations are counted tensor by tensor for transformer layers with fused attention (a test compares them
with the tensors that autograd saves), without dropout masks and the low-rank states of adapters (a few
percent). The engine of a strategy in `train/strategies` determines which tensors are sharded or gathered.
"""

from dataclasses import dataclass
from typing import Literal

from scalingnote.core import GIB
from scalingnote.models.config import Stored
from scalingnote.models.flops import Shape
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Optimizer, Strategy

# autocast: float32 weights, cast for each matrix product. bfloat16: weights and residual stream.
Numbers = Literal["float32", "autocast", "bfloat16"]
STORED_BYTES = {"int8": 1.0, "nf4": 0.5 + 2 / 64}  # of a frozen weight; nf4 has a scale per 64 weights
# Defaults of DeepSpeed, in elements: weights gathered at once, gradients reduced at once.
MAX_LIVE_PARAMETERS = 1e9
BUCKET_ELEMENTS = 5e8
RUNTIME_BYTES = 1.5 * GIB  # CUDA context, NCCL buffers
FRAGMENTATION = 0.05  # share of allocated memory in blocks that the allocator cannot join


def layer_bytes(shape: Shape, numbers: Numbers) -> int:
    """Count the bytes per token that autograd keeps of one layer for its backward pass, if not recomputed."""
    wide = 4 if numbers == "float32" else 2
    heads = 4 * shape.heads  # log-sum-exp of the softmax
    if not shape.causal:
        # Both norms, inputs of all matrices, queries, keys, values and the output of attention.
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
    """Count the bytes of a token's activations in all layers at the peak."""
    layer = layer_bytes(shape, numbers)
    residual = (2 if numbers == "bfloat16" else 4) * shape.hidden
    # Gradients of the feed-forward part, the widest in a layer, during its backward pass.
    feed_forward = 3 * (4 if numbers == "float32" else 2) * shape.intermediate
    ends = 3 * residual  # of token embeddings and the last norm
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
        """Bytes on the GPU."""
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
    """Count the bytes of weights, gradients and optimizer state on one GPU.

    Args:
        strategy: division of these over the GPUs.
        optimizer: AdamW, with moments of 8 bits or of float32.
        trained: number of trained parameters.
        frozen: number of frozen parameters.
        frozen_tables: number of frozen parameters in embeddings, which are always float32.
        largest: most parameters that are gathered together: a tower's token embeddings and two layers.
        gpus: number of GPUs of all nodes.
        numbers: type of numbers in the computation.
        base: storage format of frozen linear layers.
    """
    moments = 2 if optimizer.kind == "adamw_8bit" else 8  # bytes per parameter: two numbers
    everything = trained + frozen
    wide = 4 if numbers == "float32" else 2
    frozen_bytes = STORED_BYTES.get(base, wide) * (frozen - frozen_tables)
    weights = frozen_bytes + 4.0 * (trained + frozen_tables)
    match strategy:
        case Ddp():
            casts = 2.0 * trained * (numbers == "autocast")  # cached until the step ends
            return TrainingState(weights, 4.0 * trained, float(moments * trained), casts)
        case Fsdp2(reshard=reshard, offload=offload):
            shares = (weights / gpus, 4.0 * trained / gpus, moments * trained / gpus)
            gathered_weights = largest if reshard else everything
            gathered = (wide * gathered_weights + 4.0 * min(largest, trained)) * (gpus > 1)
            if offload:
                return TrainingState(0.0, 0.0, 0.0, gathered, host=sum(shares))
            return TrainingState(*shares, gathered)
        case DeepSpeed(stage=stage, offload=offload):
            weights = float(wide * everything) / (gpus if stage == 3 else 1)
            copy = 4 if wide == 2 else 0  # float32 master weights in addition to the bfloat16 ones
            offloaded = (copy + moments + 4.0) * trained / gpus  # to the host, which runs the optimizer
            full_gradients = float(wide * trained) if stage == 1 else 0.0
            gathered = 4.0 * min(BUCKET_ELEMENTS, trained)
            if stage == 3:
                gathered += wide * min(MAX_LIVE_PARAMETERS, everything)
                if offload:
                    return TrainingState(0.0, 0.0, 0.0, gathered, host=offloaded + weights)
            if offload:
                return TrainingState(weights, full_gradients, 0.0, gathered, host=offloaded)
            gradients = full_gradients + 4.0 * trained / gpus
            return TrainingState(weights, gradients, (copy + moments) * trained / gpus, gathered)


def score_bytes(
    *, rows: int, ranks: int, columns: int, views: int, prefixes: tuple[int, ...], dim: int
) -> float:
    """Count the bytes of the loss: embeddings of all ranks, their prefixes, and one GPU's score matrix.

    Each matrix is freed before that of the next view or prefix; only gradients of embeddings remain.

    Args:
        rows: number of queries on this GPU in a step.
        ranks: number of GPUs of all nodes.
        columns: number of candidates that a query adds: its positive and its negatives.
        views: number of embeddings of a document.
        prefixes: Matryoshka dimensions.
        dim: dimension of a complete embedding.
    """
    everywhere = rows * ranks * (columns * views + 1)
    # For each prefix: the normalized copy, its accumulated gradient, and the gradient in flight.
    embeddings = 4.0 * everywhere * (dim + 3 * sum(prefixes))
    pairs = float(rows * rows * ranks * columns)
    return embeddings + 2 * 4.0 * pairs + 2.0 * pairs
