"""Activations: the bytes that autograd keeps of a token until its backward pass.

The counts are those of transformers' layers with fused attention, tensor by tensor (a test compares them with
what autograd really saves). Dropout masks and adapters' low-rank states, a few hundredths, are left out.
"""

from typing import Literal

from scalingnote.models.flops import Shape

# autocast: float32 weights, cast for every product. bfloat16: weights and residual stream alike.
Numbers = Literal["float32", "autocast", "bfloat16"]


def layer_bytes(shape: Shape, numbers: Numbers) -> int:
    """Of one token in one layer, nothing recomputed."""
    wide = 4 if numbers == "float32" else 2
    heads = 4 * shape.heads  # logarithms of the softmax's sums
    if not shape.causal:
        # Both norms, the inputs of all matrices, queries, keys, values and what attention gave.
        states, sums = {"float32": (32, 16), "autocast": (24, 16), "bfloat16": (16, 8)}[numbers]
        return states * shape.hidden + 2 * wide * shape.intermediate + heads + sums
    # RMSNorm works in float32 whatever comes in; under autocast each matrix also keeps its own cast.
    states = {"float32": 24, "autocast": 26, "bfloat16": 16}[numbers] * shape.hidden
    attention = 2 * wide * (shape.query_width + shape.kv_width) + heads
    if shape.qk_norm:
        attention += (2 * wide + (0 if wide == 4 else 2)) * (shape.query_width + shape.kv_width)
        attention += 4 * (shape.heads + shape.kv_heads)
    return states + attention + 4 * wide * shape.intermediate + 8


def tower_bytes(shape: Shape, numbers: Numbers, *, checkpointing: bool) -> int:
    """Of one token in all layers, at the moment when there are most."""
    layer = layer_bytes(shape, numbers)
    residual = (2 if numbers == "bfloat16" else 4) * shape.hidden
    # Gradients of the feed-forward part, the widest in a layer, while it goes backward.
    passing = 3 * (4 if numbers == "float32" else 2) * shape.intermediate
    ends = 3 * residual  # token embeddings, the last norm
    if checkpointing:
        return shape.layers * residual + layer + passing + ends
    return shape.layers * layer + passing + ends
