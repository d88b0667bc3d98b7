"""Term weights of documents: a language-model head over their states, and the maximum of each term.

    SparseHead   hidden [tokens, hidden] -> [rows, vocabulary]

Logits are computed in the precision of the states; everything else in float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F
from transformers.activations import ACT2FN

MAX_LOGITS = 1 << 23  # numbers in a chunk of logits: 32 MB in float32
_CHUNK_TOKENS, _CHUNK_POSITIONS = 2048, 256  # large enough for a matrix product at full speed
_CHUNK_COLUMNS = 16_384  # terms per chunk of the backward pass


class SparseHead(nn.Module):
    """Term weights of documents from a language-model head (LightRetriever, section 2.3).

        weight[row, term] = log(1 + relu(max over the row's places of logit[place, term]))

    The head is the checkpoint's own, or the rows of the input table. The head of a masked language model also
    has a transform before and a bias after the logits; without them, SPLADE's checkpoints start with wrong
    weights. The maximum is taken before relu and log, which are monotonic (Eq. 12 of appendix A.5), and is
    fused with the projection: the full [tokens, vocabulary] logits are never in memory.
    """

    def __init__(
        self,
        own: Float[Tensor, "vocabulary hidden"] | None,
        *,
        transform: "HeadTransform | None" = None,
        bias: Float[Tensor, " vocabulary"] | None = None,
    ) -> None:
        """Make a head; `own` is its matrix, None for the backbone's input table; `bias` is of the logits."""
        super().__init__()
        self.own: nn.Linear | None = None
        if own is not None:
            self.own = nn.Linear(own.shape[1], own.shape[0], bias=False, device="meta")
            self.own.weight = nn.Parameter(own)
        self.transform = transform
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        places: Int[Tensor, "rows longest"],
        table: nn.Parameter,
    ) -> Float[Tensor, "rows vocabulary"]:
        """Return non-negative term weights; a row without places has none.

        Args:
            hidden: states of all rows end to end.
            places: indices into `hidden` of the tokens that count in each row; -1 is not a token.
            table: the backbone's input table, which is the head if `own` was None.
        """
        weight = _full_tensor(table if self.own is None else self.own.weight)
        hidden = hidden if self.transform is None else self.transform(hidden)
        logits = project_then_max(hidden, places, weight)
        if self.bias is not None:  # shorter than the input table, which has rows for new tokens
            bias = _full_tensor(self.bias).float()
            logits = logits + F.pad(bias, (0, logits.shape[1] - len(bias)))
        return torch.log1p(torch.relu(logits))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a saved tower's file by name; none if the head is only the input table."""
        state = {name.removeprefix("own."): value for name, value in self.state_dict().items()}
        return {name: value.detach().contiguous() for name, value in state.items()}

    @property
    def facts(self) -> dict[str, Any] | None:
        """Settings of the transform in a saved tower's tower.json; None without a transform."""
        return None if self.transform is None else self.transform.facts

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None) -> "SparseHead":
        """Build a head from the results of :meth:`tensors` and :attr:`facts`."""
        transform = None
        if facts is not None:
            parts = {name.removeprefix("transform."): value for name, value in tensors.items()}
            transform = HeadTransform(parts, **facts)
        return cls(tensors.get("weight"), transform=transform, bias=tensors.get("bias"))


class HeadTransform(nn.Module):
    """Layers of a masked language model before its logits: dense, activation, LayerNorm."""

    def __init__(self, weights: Mapping[str, Tensor], *, activation: str, eps: float) -> None:
        """Copy ``dense.weight`` and ``norm.weight``, and ``dense.bias`` and ``norm.bias`` if they exist.

        `activation` is a name of transformers; `eps` is that of LayerNorm.
        """
        super().__init__()
        dense, norm = weights["dense.weight"], weights["norm.weight"]
        self.facts = {"activation": activation, "eps": eps}
        self.dense = nn.Linear(dense.shape[1], dense.shape[0], bias="dense.bias" in weights)
        self.norm = nn.LayerNorm(len(norm), eps=eps, bias="norm.bias" in weights)
        self._activation = ACT2FN[activation]
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens out"]:
        """Return transformed states."""
        weight, *others = (
            None if each is None else _full_tensor(each)
            for each in (self.dense.weight, self.dense.bias, self.norm.weight, self.norm.bias)
        )
        assert weight is not None
        inner = self._activation(F.linear(hidden.to(weight.dtype), weight, others[0]))
        return F.layer_norm(inner, self.norm.normalized_shape, others[1], others[2], self.norm.eps)


def project_then_max(
    hidden: Float[Tensor, "tokens hidden"],
    places: Int[Tensor, "rows longest"],
    weight: Float[Tensor, "vocabulary hidden"],
    *,
    max_logits: int = MAX_LOGITS,
) -> Float[Tensor, "rows vocabulary"]:
    """Return the maximum of each logit over a row's places, at least in float32; -inf for no places.

    `places` are indices into `hidden`; -1 is not a token. Among equal logits the first place wins, and only
    it gets the gradient. Logits are computed in chunks of at most `max_logits`.
    """
    out: Tensor = _ProjectThenMax.apply(hidden, places, weight, max_logits)  # type: ignore[no-untyped-call]
    return out


def strongest(
    weights: Float[Tensor, "rows vocabulary"], k: int
) -> tuple[Int[Tensor, "rows k"], Float[Tensor, "rows k"]]:
    """Return the k terms with the largest weights of each row, and these weights; some may be 0."""
    top = weights.topk(min(k, weights.shape[1]), dim=1)
    return top.indices, top.values


class _ProjectThenMax(torch.autograd.Function):
    """Maximum of logits that stores the winning place of each term (2 or 4 bytes).

    The backward pass consists of two sparse products.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor, weight: Tensor, max_logits: int) -> Tensor:
        device = hidden.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        (rows, longest), vocabulary = places.shape, len(weight)
        best = torch.full((rows, vocabulary), -torch.inf, dtype=wide, device=hidden.device)
        small = torch.int16 if longest <= torch.iinfo(torch.int16).max else torch.int32
        winner = torch.zeros((rows, vocabulary), dtype=small, device=hidden.device)
        span = min(longest, _CHUNK_POSITIONS)
        height = max(_CHUNK_TOKENS // span, 1)
        width = max(max_logits // (height * span), 1)
        for left in range(0, vocabulary, width):
            part = slice(left, left + width)
            columns = weight[part].to(low).T
            for top in range(0, rows, height):
                for first in range(0, longest, span):
                    block_places = places[top : top + height, first : first + span]
                    logits = hidden[block_places.clamp(min=0)].to(low) @ columns
                    logits.masked_fill_((block_places < 0)[:, :, None], -torch.inf)
                    values, at = logits.max(dim=1)
                    block = (slice(top, top + height), part)
                    better = values > best[block]
                    best[block] = torch.where(better, values.to(wide), best[block])
                    winner[block] = torch.where(better, (at + first).to(small), winner[block])
        ctx.save_for_backward(hidden, places, weight, winner)
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, places, weight, winner = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(grad.dtype)
            to_hidden = torch.zeros_like(states) if of_hidden else None
            to_weight = torch.zeros(weight.shape, dtype=grad.dtype, device=grad.device) if of_weight else None
            for left in range(0, len(weight), _CHUNK_COLUMNS):
                part = slice(left, left + _CHUNK_COLUMNS)
                piece = grad[:, part]
                row, column = piece.nonzero(as_tuple=True)
                token = places[row, winner[:, part][row, column].long()]
                is_token = token >= 0
                row, column, token = row[is_token], column[is_token], token[is_token]
                # index_add_ with rows of [terms, hidden] was 14 times slower (two cores).
                shares = torch.sparse_coo_tensor(
                    torch.stack([token, column]),
                    piece[row, column],
                    (len(states), piece.shape[1]),
                    check_invariants=False,
                )
                if to_hidden is not None:
                    to_hidden += torch.sparse.mm(shares, weight[part].to(grad.dtype))
                if to_weight is not None:
                    to_weight[part] = torch.sparse.mm(shares.t(), states)
        return (
            None if to_hidden is None else to_hidden.to(hidden.dtype),
            None,
            None if to_weight is None else to_weight.to(weight.dtype),
            None,
        )


def _full_tensor(weight: Tensor) -> Tensor:
    """Gather a weight that fsdp2 shards; its gradient is averaged over ranks, like those of other weights."""
    if not isinstance(weight, DTensor):
        return weight
    full: Tensor = weight.full_tensor(grad_placements=[Partial("avg")])
    return full
