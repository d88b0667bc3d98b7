"""Frozen linear layers stored in 8 or 4 bits, below adapters that learn.

    int8   a row is a scale times integers of at most 127
    nf4    NF4_BLOCK weights of a row are a scale times 16 quantiles of the normal distribution, packed by
           bitsandbytes (Dettmers et al. 2023, QLoRA, section 3)

What is trained, merged and published is the unpacked weight, not the one that was packed.
"""

from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.errors import ConfigError
from scalingnote.models.config import Stored

NF4_BLOCK = 64  # weights that share a scale


def store_base(model: nn.Module, base: Stored) -> None:
    """Store the linear layers of a frozen model in 8 or 4 bits, in place; "full" leaves them as they are.

    Trees that share weights are made afterwards, or each gets its own bytes. Embeddings, norms and layers
    that are no `nn.Linear` (GPT-2's) stay as they are.

    Raises:
        ConfigError: a package is missing, or the width of a layer is no multiple of NF4_BLOCK.
    """
    if base == "full":
        return
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            model.set_submodule(name, FrozenLinear(layer, base))


class FrozenLinear(nn.Linear):
    """A frozen linear layer whose weight is stored in 8 or 4 bits and unpacked for each product.

    The backward pass unpacks again, so no more than one unpacked weight is in memory. Products are in the
    dtype of the input, or of autocast.
    """

    def __init__(self, layer: nn.Linear, base: Stored) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a weight in float32
        self.in_features, self.out_features, self.base = layer.in_features, layer.out_features, base
        packed, scales = _pack(layer.weight.detach().float(), base)
        # Both with a row for each output, so that fsdp2 shards them.
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, as a linear layer with the unpacked weight does."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        product: Tensor = _FrozenProduct.apply(input, self.weight, self.scales, self.base)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def unpacked(self) -> nn.Linear:
        """Return the layer with its weight in float32."""
        layer = nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device=self.weight.device
        )
        layer.weight.data = _unpack(self.weight, self.scales, self.base, torch.float32)
        if self.bias is not None:
            layer.bias.data = self.bias.detach().float()
        return layer


class _FrozenProduct(torch.autograd.Function):
    """A product with a packed weight; only the input gets a gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, packed: Tensor, scales: Tensor, base: Stored) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.base = base
        return F.linear(input, _unpack(packed, scales, base, input.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        packed, scales = ctx.saved_tensors
        return gradient @ _unpack(packed, scales, ctx.base, gradient.dtype), None, None, None


def _pack(
    weight: Float[Tensor, "out wide"], base: Stored
) -> tuple[Int[Tensor, "out packed"] | UInt8[Tensor, "out packed"], Float[Tensor, "out blocks"]]:
    """Return a weight's bytes, int8 or two nf4 numbers each, and the scales of its rows or blocks."""
    if base == "int8":
        scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        scales = scales.bfloat16()
        return (weight / scales.float()).round().clamp(-127, 127).to(torch.int8), scales
    rows, width = weight.shape
    if width % NF4_BLOCK:
        raise ConfigError(f"lora.base: nf4 needs widths that {NF4_BLOCK} divides, found {width}: choose int8")
    packed, state = _four_bits().quantize_4bit(weight.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
    return packed.view(rows, -1), state.absmax.view(rows, -1).bfloat16()


def _unpack(packed: Tensor, scales: Tensor, base: Stored, dtype: torch.dtype) -> Float[Tensor, "out wide"]:
    """Return the weight that :func:`_pack` packed, in `dtype`."""
    if base == "int8":
        return packed.to(dtype).mul_(scales)
    functions = _four_bits()
    state = functions.QuantState(
        absmax=scales.float().flatten(),
        shape=torch.Size((len(packed), 2 * packed.shape[1])),
        dtype=dtype,
        blocksize=NF4_BLOCK,
        quant_type="nf4",
    )
    return functions.dequantize_4bit(packed.view(-1, 1), state)  # type: ignore[no-any-return]


def _four_bits() -> Any:
    """Return bitsandbytes' functions; ConfigError without the package."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ConfigError(
            f"lora.base: nf4 needs bitsandbytes ({error}): pip install bitsandbytes, or choose int8"
        ) from None
    return functional
