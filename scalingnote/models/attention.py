"""Attention over packed rows: every other layer sees one long line of tokens, only attention knows rows.

    query, key, value [1, heads, total, head_dim]
        -> half precision on a GPU: one variable-length kernel over all rows
        -> elsewhere: rows of equal length together, one plain attention per length
    -> [1, total, heads, head_dim]

Registered with transformers under one name that also serves padded rows (by its own `sdpa`): which of
the two a call is stands in the call's arguments, so recomputed layers do what the first pass did.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_flash_attn_2_available

from scalingnote.errors import ConfigError
from scalingnote.models.batch import Batch, Packing

NAME = "scalingnote"
Attention = Literal["auto", "eager", "sdpa", "flash_attention_2"]
# Families whose layers hand our arguments down to attention and mix tokens nowhere else; each is tested
# to give packed rows the embeddings and gradients of padded ones. All others are padded.
FAMILIES = frozenset(
    {
        *("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma"),
        *("bert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert"),
    }
)


def choose(model: nn.Module, attention: Attention) -> bool:
    """Set how `model` attends; true when it then reads packed rows.

    ConfigError when FlashAttention is asked for and not installed.
    """
    settings: Any = model.config
    # A decoder that reads both ways within a window: its window is counted otherwise than in `_band`.
    windowed = getattr(settings, "is_causal", None) is False and getattr(settings, "sliding_window", None)
    known = settings.model_type in FAMILIES and not windowed
    match attention:
        case "eager":
            model.set_attn_implementation("eager")  # type: ignore[operator]
            return False
        case "flash_attention_2":
            if not is_flash_attn_2_available():
                raise ConfigError(
                    "attention=flash_attention_2 needs an NVIDIA GPU and the package flash-attn: "
                    "install scalingnote[gpu], or set attention=auto"
                )
            model.set_attn_implementation("flash_attention_2")  # type: ignore[operator]
        case "auto" | "sdpa":
            model.set_attn_implementation(NAME if known else "sdpa")  # type: ignore[operator]
    return known


def arguments(model: nn.Module, batch: Batch, *, causal: bool) -> dict[str, Any]:
    """What the backbone's forward takes besides the ids."""
    shift = first_position(model)
    if batch.packing is None:
        # Right padding: in a causal model real tokens never see pads, and no mask means the fast kernel.
        found: dict[str, Any] = {"attention_mask": None if causal else batch.mask}
        if shift:
            found["position_ids"] = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None] + shift
        return found
    packing = batch.packing
    found = {"position_ids": packing.position_ids + shift}
    if model.config._attn_implementation == NAME:  # type: ignore[union-attr]
        # transformers takes a mask of four dimensions as it is: without one it builds [total, total].
        found |= {"attention_mask": batch.ids.new_empty(1, 1, 0, 0), "packing": packing}
    else:
        found |= {f"cu_seq_lens_{side}": packing.offsets for side in "qk"}
        found |= {f"max_length_{side}": packing.longest for side in "qk"}
    return found


def first_position(model: nn.Module) -> int:
    """Number of the first position: RoBERTa and its kin count from one behind their pad token's id."""
    embeddings = getattr(model, "embeddings", None)
    counts = hasattr(embeddings, "create_position_ids_from_input_ids")
    return int(embeddings.padding_idx) + 1 if counts else 0  # type: ignore[union-attr]


def attend(
    module: nn.Module,
    query: Float[Tensor, "lines heads tokens width"],
    key: Float[Tensor, "lines groups tokens width"],
    value: Float[Tensor, "lines groups tokens width"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "lines tokens heads width"], None]:
    """The attention function that transformers calls in every layer."""
    packing: Packing | None = kwargs.pop("packing", None)
    if packing is None:
        found: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, **kwargs
        )
        return found
    causal, half = bool(module.is_causal), _half(query)
    if half is None or kwargs.get("dropout"):
        out = _by_runs(query, key, value, packing, causal=causal, **kwargs)
        return out[None], None
    window = kwargs.get("sliding_window")
    reach = -1 if window is None else window - 1
    offsets, longest = packing.offsets, packing.longest
    q, k, v = (x.squeeze(0).transpose(0, 1).to(half).contiguous() for x in (query, key, value))
    out = varlen_attn(
        *(q, k, v, offsets, offsets, longest, longest),
        window_size=(reach, 0 if causal else reach),
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None], None


# Lengths change with every batch: a compiled loop over them would never be met again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_runs(
    query: Float[Tensor, "1 heads total width"],
    key: Float[Tensor, "1 groups total width"],
    value: Float[Tensor, "1 groups total width"],
    packing: Packing,
    *,
    causal: bool,
    sliding_window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> Float[Tensor, "total heads width"]:
    """One plain attention per run of rows of equal length.

    3.5 times as fast as gathering rows into a padded block and back (two cores, 32 rows of 10 to 96
    tokens), and it needs no mask.
    """
    runs = [(length, len(list(rows))) for length, rows in groupby(packing.lengths)]
    # Token by token, as layers make them: gradients are then put together in that order, without a copy.
    lines = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    split = (_apart(line, [length * rows for length, rows in runs]) for line in lines)
    outs = []
    for (length, rows), *parts in zip(runs, *split, strict=True):
        q, k, v = (part.unflatten(0, (rows, length)).transpose(1, 2) for part in parts)
        band = None
        if sliding_window is not None and sliding_window < length:
            band = _band(length, sliding_window, causal, query.device)
        out = scaled_dot_product_attention(
            *(q, k, v, band, dropout),
            is_causal=causal and band is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _apart(line: Tensor, tokens: Sequence[int]) -> Sequence[Tensor]:
    """A line's runs; one that is whole is not copied when gradients come back."""
    return line.split(list(tokens)) if len(tokens) > 1 else [line]


def _half(query: Tensor) -> torch.dtype | None:
    """The half precision that a GPU's variable-length kernel would work in here, or None."""
    if query.device.type != "cuda" or query.shape[-1] > 256 or query.shape[-1] % 8:
        return None
    if query.dtype in (torch.float16, torch.bfloat16):
        return query.dtype
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _band(length: int, window: int, causal: bool, device: torch.device) -> Bool[Tensor, "tokens tokens"]:
    """Who sees whom when a token looks back (and ahead, unless causal) less than `window` tokens."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    return (back >= 0) & (back < window) if causal else back.abs() < window


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
