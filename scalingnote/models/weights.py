"""Storage of weights: the number format of matrix products, and low-rank adapters on frozen weights.

Products are in bfloat16 if the hardware is faster with it, else in float32. Adapters (LoRA, DoRA) come from
peft. Functions import it when they run, because the import is slow and few runs need it. Linear layers below
adapters may be stored in 8 or 4 bits; training, merging and publishing then use the unpacked weight:

    int8   a row is a scale times integers of at most 127
    nf4    NF4_BLOCK weights of a row are a scale times 16 quantiles of the normal distribution, packed by
           bitsandbytes (Dettmers et al. 2023, QLoRA, section 3)

Two towers can share one backbone. They are then two module trees over the same frozen tensors, each with its
own adapter. The active adapter is therefore never switched: not between the towers of a step, not in the
second pass of GradCache, and not when gradient checkpointing recomputes a layer.
"""

import copy
import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from jaxtyping import Float, Int, UInt8
from numpy import ndarray
from safetensors.torch import save, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.hub import cached_file

from scalingnote.core.errors import ConfigError
from scalingnote.models.config import Lora, Stored
from scalingnote.storage import filesystem as fs

_Module = TypeVar("_Module", bound=nn.Module)
Precision = Literal["auto", "float32", "bfloat16"]
MEASURED_SIZE = 768  # of square matrices on a CPU
MIN_CPU_SPEEDUP = 1.5  # of bfloat16 over float32 products, from which `auto` chooses bfloat16 on a CPU
NF4_BLOCK = 64  # weights that share a scale
_ADAPTER_FILE = "adapter_model.safetensors"


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype of products; `auto` is bfloat16 if the device has fast bfloat16 units, else float32.

    Some CPUs with AVX-512 BF16 and without AMX gain nothing, others encode three times as many texts a
    second, so `auto` measures it. The environment variable SCALINGNOTE_PRECISION replaces `auto`, for equal
    results on different machines.
    """
    if precision == "auto" and (override := os.environ.get("SCALINGNOTE_PRECISION")):
        if override not in get_args(Precision):
            raise ConfigError(
                f"SCALINGNOTE_PRECISION is {override!r}: set it to one of {get_args(Precision)}"
            )
        precision = cast("Precision", override)
    if precision != "auto":
        return getattr(torch, precision)  # type: ignore[no-any-return]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = _is_cpu_faster_in_bfloat16()
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def _is_cpu_faster_in_bfloat16() -> bool:
    """Measure once, in a fifth of a second, whether this CPU multiplies bfloat16 faster than float32.

    The processor times of alternating runs are compared: all processes that encode parts of one artifact must
    reach the same decision, also on a busy machine. With wall time some did not.
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    best = dict.fromkeys((torch.bfloat16, torch.float32), float("inf"))
    factors = {dtype: torch.randn(MEASURED_SIZE, MEASURED_SIZE).to(dtype) for dtype in best}
    for _ in range(6):  # the first one only warms up
        for dtype, factor in factors.items():
            start = time.process_time()
            factor @ factor
            best[dtype] = min(best[dtype], time.process_time() - start)
    return best[torch.float32] > MIN_CPU_SPEEDUP * best[torch.bfloat16]


def default_device() -> torch.device:
    """Return the default device of encoders: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_in(dtype: torch.dtype, read: Callable[[torch.dtype], _Module]) -> _Module:
    """Return the module that `read` loads in `dtype`, so that no weight is in memory in a wider format.

    Buffers such as Gemma's scale of embeddings must stay float32. If `read` would round one, the module is
    read in float32, for the caller to convert by :func:`cast_parameters`.
    """
    module = read(dtype)
    buffers = (buffer.dtype for buffer in module.buffers() if buffer.is_floating_point())
    return module if all(buffer_dtype == torch.float32 for buffer_dtype in buffers) else read(torch.float32)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters of `module` to `dtype` in place, but not its buffers.

    Rotary frequencies are buffers, and an angle is a frequency times a position: at a base of 10^6 and heads
    of 128, bfloat16 frequencies have an error of 0.6 radians between tokens at a distance of 512.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations a second of large matrix products, the best of three runs.

    It is the peak that a model's utilisation is compared with. The measurement takes 0.1 s on one CPU core.
    """
    gpu = device.type == "cuda"
    size = 8192 if gpu else MEASURED_SIZE
    # On a CPU, processor time is measured: with wall time, other processes would lower the peak, and a model
    # could exceed it.
    clock, threads = (time.perf_counter, 1) if gpu else (time.process_time, torch.get_num_threads())
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):  # the first one only warms up
        start = clock()
        left @ right
        if gpu:
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return 2 * size**3 * threads / best


def share_weights(model: nn.Module) -> nn.Module:
    """Return a copy of the module tree over the same tensors, so that weights are in memory once.

    With fsdp2 each tree has its own shards: twice the frozen weights, divided by the number of ranks.
    """
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def add_adapter(model: nn.Module, lora: Lora, *, name: str, tokens: Sequence[int], seed: int) -> None:
    """Freeze `model`, add adapter `name` to it, and make the embeddings of `tokens` trainable.

    Linear layers are stored in the format `lora.base`, see :func:`store_base`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft accepts fractions
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules="all-linear",
    )
    model.requires_grad_(False)
    store_base(model, lora.base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name=name)
    if tokens:
        table = model.get_input_embeddings()  # type: ignore[operator]
        model.set_input_embeddings(NewTokens(table, tokens))  # type: ignore[operator]


class NewTokens(nn.Module):
    """A frozen table of token embeddings with a few trainable rows.

    peft has the same feature (`trainable_token_indices`), but copies the entire table in every forward pass:
    2 GB for a vocabulary of 152,000 and a hidden size of 3,584.
    """

    def __init__(self, table: nn.Embedding, tokens: Sequence[int]) -> None:
        super().__init__()
        self.table = table
        self.tokens: Int[Tensor, " new"]
        self.register_buffer("tokens", torch.tensor(tokens, device=table.weight.device), persistent=False)
        self.rows = nn.Parameter(table.weight.detach()[self.tokens].float())

    @property
    def weight(self) -> Float[Tensor, "vocabulary hidden"]:
        """A copy of the table that contains the new rows."""
        weight = self.table.weight.detach().clone()
        weight[self.tokens] = self.rows.detach().to(weight.dtype)
        return weight

    def forward(self, ids: Int[Tensor, "lines tokens"]) -> Float[Tensor, "lines tokens hidden"]:
        """Return token embeddings."""
        embeddings: Tensor = self.table(ids)
        hits = ids[..., None] == self.tokens
        scale = getattr(self.table, "embed_scale", 1.0)  # Gemma's tables scale their output
        rows = (hits.to(self.rows.dtype) @ self.rows) * scale
        return torch.where(hits.any(-1, keepdim=True), rows.to(embeddings.dtype), embeddings)


def lower_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen linear weights in the format of their products: half the memory, no cast per call.

    It is for training under autocast to `dtype`; float32 changes nothing. Trainable weights, norms and
    embeddings keep their format.
    """
    if dtype == torch.float32:
        return
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
            cast_parameters(layer, dtype)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the backbone's state with adapters merged into its weights; leave `model` unchanged.

    One layer is merged at a time, in float32: half precision would lose the small updates.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    state: dict[str, Tensor] = {}
    replaced: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(tuple(replaced)):
            continue
        if isinstance(module, BaseTunerLayer):
            layer: Any = copy.deepcopy(module)
            if isinstance(layer.base_layer, FrozenLinear):
                layer.base_layer = layer.base_layer.unpack()
            layer.float()
            layer.merge(safe_merge=True)
            tensors = layer.get_base_layer().state_dict()
        elif isinstance(module, NewTokens):
            tensors = {"weight": module.weight}
        else:
            continue
        replaced.append(f"{name}.")
        state |= {f"{name}.{key}": value for key, value in tensors.items()}
    prefixes = tuple(replaced)
    rest = {key: value for key, value in model.state_dict().items() if not key.startswith(prefixes)}
    return rest | state


def save_adapter(model: nn.Module, folder: Path, *, name: str, base: str) -> None:
    """Write adapter `name` in peft's format, as an adapter of the backbone at path `base`."""
    from peft import get_peft_model_state_dict

    settings: Any = copy.copy(model.peft_config[name])  # type: ignore[index]
    settings.base_model_name_or_path, settings.inference_mode = base, True
    weights = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    for path, module in model.named_modules():
        if isinstance(module, NewTokens):
            weights[f"{path}.token_adapter.trainable_tokens_delta"] = module.rows
            settings.trainable_token_indices = {path.rpartition(".")[2]: module.tokens.tolist()}
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(folder)
    save_file(
        {f"base_model.model.{key}": value.detach().contiguous() for key, value in weights.items()},
        folder / _ADAPTER_FILE,
        {"format": "pt"},
    )


def load_adapter(model: nn.Module, path: str | Path) -> nn.Module:
    """Return `model` with the adapter at `path`, a folder or hub id that peft reads, merged into its weights.

    Raise ConfigError if the adapter is not in safetensors, because peft would read a pickle.
    """
    from peft import PeftModel

    if cached_file(str(path), _ADAPTER_FILE, _raise_exceptions_for_missing_entries=False) is None:
        raise ConfigError(
            f"{str(path)!r} has no {_ADAPTER_FILE}: save the adapter again, pickles are not read"
        )
    with warnings.catch_warnings():
        # peft 0.21 still uses the old name in transformers 5.23.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted: Any = PeftModel.from_pretrained(model, str(path))
    merged_model: nn.Module = adapted.merge_and_unload(safe_merge=True)
    return merged_model


def store_base(model: nn.Module, base: Stored) -> None:
    """Store the linear layers of a frozen model in 8 or 4 bits, in place; "full" leaves them as they are.

    Call it before :func:`share_weights`, or each tree gets its own copy. Embeddings, norms and layers that
    are not `nn.Linear` (GPT-2's) are not changed. Raise ConfigError if a package is missing, or if the width
    of a layer is not a multiple of NF4_BLOCK.
    """
    if base == "full":
        return
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            model.set_submodule(name, FrozenLinear(layer, base))


class FrozenLinear(nn.Linear):
    """A frozen linear layer whose weight is stored in 8 or 4 bits and unpacked for each product.

    The backward pass unpacks it again, so at most one unpacked weight is in memory. Products are in the dtype
    of the input, or of autocast.
    """

    def __init__(self, layer: nn.Linear, base: Stored) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a weight in float32
        self.in_features, self.out_features, self.base = layer.in_features, layer.out_features, base
        packed, scales = _pack(layer.weight.detach().float(), base)
        # Both with a row for each output, so that fsdp2 shards them.
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, like a linear layer with the unpacked weight."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        product: Tensor = _FrozenProduct.apply(input, self.weight, self.scales, self.base)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def unpack(self) -> nn.Linear:
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
        raise ConfigError(
            f"lora.base: nf4 needs widths that are multiples of {NF4_BLOCK}, found {width}: choose int8"
        )
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
    """Return bitsandbytes' functions; raise ConfigError if the package is missing."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ConfigError(
            f"lora.base: nf4 needs bitsandbytes ({error}): pip install bitsandbytes, or choose int8"
        ) from None
    return functional


def write_vocabulary(
    folder: str,
    *,
    tokens: Float[Tensor, "vocabulary hidden"],
    alone: Float[ndarray, "vocabulary dim"] | None,
    tokenizer_json: str,
) -> None:
    """Write a teacher's vectors that a student may start from, so that distillation never loads the teacher.

    Args:
        folder: URI for ``tokens.safetensors``, ``alone.safetensors`` and ``tokenizer.json``.
        tokens: the teacher's input embedding of each token.
        alone: its embedding of a query with only this token; None: not written.
        tokenizer_json: its tokenizer.
    """
    weights = {"tokens": tokens.float().cpu().contiguous()}
    if alone is not None:
        weights["alone"] = torch.from_numpy(alone)
    for name, weight in weights.items():
        fs.write_bytes(fs.join(folder, f"{name}.safetensors"), save({"weight": weight}))
    fs.write_bytes(fs.join(folder, "tokenizer.json"), tokenizer_json.encode())
