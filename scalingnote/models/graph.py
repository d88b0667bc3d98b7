"""A query tower as one module of tensors alone: what is traced into an ONNX graph.

The mask of attention is made here, the same for every family; and the last layer of a BERT computes what is
read of it, the first position, and no more.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scalingnote.models.attention import first_position
from scalingnote.models.tower import Tower


class QueryGraph(nn.Module):
    """ids, mask -> embeddings. It changes the tower's modules: the tower is not to be used any more."""

    backbone: Any

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.backbone = tower.backbone
        self.projection, self._causal = tower.projection, tower.causal
        self.backbone.set_attn_implementation("eager")
        settings: Any = self.backbone.config
        self._by_layer = "sliding_attention" in (getattr(settings, "layer_types", None) or ())
        self._window: int | None = getattr(settings, "sliding_window", None)
        self._shift = first_position(self.backbone)
        self._reduced = not self._causal and _is_bert(self.backbone)
        if self._reduced:
            layers: Any = self.backbone.encoder.layer
            layers[-1] = FirstPosition(layers[-1])

    def forward(
        self, ids: Int[Tensor, "rows tokens"], mask: Int[Tensor, "rows tokens"]
    ) -> Float[Tensor, "rows dim"]:
        """Embeddings of rows that are padded on the right, not normalised."""
        masks: Any = self._mask(mask, self._window)
        if self._by_layer:
            masks = {"full_attention": self._mask(mask, None), "sliding_attention": masks}
        more: dict[str, Any] = {"use_cache": False} if self._causal else {}
        if self._shift:
            more["position_ids"] = torch.arange(ids.shape[1])[None] + self._shift
        hidden = self.backbone(input_ids=ids, attention_mask=masks, **more).last_hidden_state
        if not self._causal:
            return self.projection(hidden[:, 0])  # type: ignore[no-any-return]
        last = mask.sum(1) - 1
        return self.projection(hidden[torch.arange(hidden.shape[0]), last])  # type: ignore[no-any-return]

    def _mask(
        self, mask: Int[Tensor, "rows tokens"], window: int | None
    ) -> Float[Tensor, "rows 1 queries tokens"]:
        """What is added to the scores: 0 where a token may look, a large negative number elsewhere."""
        allowed = mask.bool()[:, None, None, :]
        at = torch.arange(mask.shape[1])
        back = at[:, None] - at[None, :]
        if self._causal:
            allowed = allowed & (back >= 0)
        if window is not None:
            allowed = allowed & (back < window if self._causal else back.abs() <= window)
        # Not the most negative number: 8-bit graphs scale by the largest value they meet.
        return torch.zeros(allowed.shape).masked_fill(~allowed, -1e4)


class FirstPosition(nn.Module):
    """BERT's last layer where only its first position is read: keys and values of all, the rest of one.

    Exactly what the whole layer gives there, for a sixth of its arithmetic.
    """

    layer: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: Float[Tensor, "rows tokens hidden"], mask: Tensor, *_: Any, **__: Any
    ) -> Float[Tensor, "rows 1 hidden"]:
        """The state of the first position after this layer."""
        attention, first = self.layer.attention.self, hidden[:, :1]
        width = attention.attention_head_size

        def heads(states: Tensor) -> Tensor:
            parted: Tensor = states.unflatten(-1, (-1, width)).transpose(1, 2)
            return parted

        scores = heads(attention.query(first)) @ heads(attention.key(hidden)).transpose(2, 3)
        shares = (scores / math.sqrt(width) + mask).softmax(-1)
        context = (shares @ heads(attention.value(hidden))).transpose(1, 2).flatten(2)
        state: Tensor = self.layer.feed_forward_chunk(self.layer.attention.output(context, first))
        return state


def _is_bert(backbone: nn.Module) -> bool:
    """Whether its layers are built as BERT's are, whatever the family is called."""
    layers = getattr(getattr(backbone, "encoder", None), "layer", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return False
    own = getattr(getattr(layers[-1], "attention", None), "self", None)
    return hasattr(layers[-1], "feed_forward_chunk") and all(
        hasattr(own, name) for name in ("query", "key", "value", "attention_head_size")
    )
