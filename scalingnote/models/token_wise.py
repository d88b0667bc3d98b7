"""LightRetriever's query tower: the mean of tokens that are each read after an instruction (section 2.2).

    line        [instruction | token end | token end | ...]   the instruction once, then blocks
    mask        a block attends to the instruction and itself (appendix A.5); positions restart in each block
    vectors     [tokens, dim]     states at the end tokens, projected (Eq. 3)
    embedding   [queries, 1, dim] their mean over a query's tokens (Eq. 4)

The vector of a token does not depend on the rest of its query. Therefore a batch encodes each distinct token
once, many per line, and the vectors of the entire vocabulary are the table that is saved: a lookup tower
(Eq. 6).
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from numpy import ndarray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import Progress, get_logger
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, attention_arguments, choose_attention, first_position
from scalingnote.models.config import TokenWiseConfig, TowerConfig
from scalingnote.models.heads import Projection
from scalingnote.models.lookup import LookupPrompt, LookupTower
from scalingnote.models.prompt import without_limits
from scalingnote.models.tower import Tower, tower_prompt

log = get_logger("train")
BLOCKS = 32  # per line: 64 tokens, about twice an instruction, so that the instruction costs little
TASKS = "tasks"  # subfolder of a saved tower: a lookup tower for each further instruction
_TABLE_LINES = 64  # per forward pass, when the table is computed
_INSTRUCTION = -1  # the block number of the instruction's tokens


class TokenReader(nn.Module):
    """A tower that reads every token by itself; the base class for queries and for documents.

    Its buffers ``instruction_0``, ... hold the tokens of instructions, which are read once before all tokens.
    """

    backbone: nn.Module
    projection: Projection
    end: int  # the token that follows every token; its state is the vector of that token

    def instruction(self, number: int = 0) -> Int[Tensor, " instruction"]:
        """Return the tokens of the instruction with this number."""
        return getattr(self, f"instruction_{number}")  # type: ignore[no-any-return]

    def forward(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return float32 embeddings, not normalised, of padded or packed rows; 0 for a row without tokens."""
        ids, lengths = batch.flat()
        instruction = self.instruction(batch.instruction)
        # More than half of a batch's tokens are repetitions: each distinct token is encoded once.
        distinct, place = ids.unique(return_inverse=True)
        if not len(distinct):  # every rank needs a forward pass, which gathers sharded weights
            distinct = instruction.new_tensor([self.end])
        vectors = self.token_vectors(distinct, instruction)
        return F.embedding_bag(place, vectors, lengths.cumsum(0) - lengths, mode="mean")[:, None]

    def token_vectors(
        self, ids: Int[Tensor, " tokens"], instruction: Int[Tensor, " instruction"]
    ) -> Float[Tensor, "tokens dim"]:
        """Return the vector of each token, read after the tokens of an instruction.

        One forward pass reads as many lines as needed.
        """
        lines = -(-len(ids) // BLOCKS)
        blocks, start = -(-len(ids) // lines), len(instruction)
        # The last line is filled with repeated tokens, so that no line has pads and one mask fits all lines.
        filled = torch.cat([ids, ids[-1:].expand(lines * blocks - len(ids))]).view(lines, blocks)
        pairs = torch.stack([filled, torch.full_like(filled, self.end)], dim=2).flatten(1)
        device = ids.device
        within = torch.arange(start, start + 2, device=device).repeat(blocks)
        positions = torch.cat([torch.arange(start, device=device), within])[None]
        states = self._states(
            torch.cat([instruction.expand(lines, -1), pairs], dim=1),
            attention_mask=self._mask(start, blocks, device),
            position_ids=positions + first_position(self.backbone),
        )
        ends = states[:, start + 1 :: 2].flatten(0, 1)[: len(ids)]
        return self.projection(ends)  # type: ignore[no-any-return]

    def _mask(self, instruction: int, blocks: int, device: torch.device) -> Tensor:
        """Return the block mask in the form of the backbone's attention: boolean, or added to scores."""
        visible = block_mask(instruction, blocks, device)[None, None]
        if self.backbone.config._attn_implementation != "eager":  # type: ignore[union-attr]
            return visible
        dtype: torch.dtype = self.backbone.dtype  # type: ignore[assignment]
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )

    def _states(
        self, ids: Int[Tensor, "lines tokens"], **kwargs: Any
    ) -> Float[Tensor, "lines tokens hidden"]:
        return self.backbone(input_ids=ids, use_cache=False, **kwargs).last_hidden_state  # type: ignore[no-any-return]


class TokenWise(TokenReader):
    """The query tower during training; :meth:`save` writes a lookup table without the model."""

    role, views, packs = "query", ("query",), True

    def __init__(self, backbone: Backbone, config: TokenWiseConfig, *, dim: int) -> None:
        super().__init__()
        self.backbone, self.tokenizer, self.causal = backbone.model, backbone.tokenizer, backbone.causal
        self.projection = Projection(backbone.hidden, dim)
        self.config, self.dim, self.pad = config, dim, backbone.special.pad
        choose_attention(backbone.model, "auto")
        tokens = without_limits(backbone.raw_tokenizer)
        self.prompt = LookupPrompt(tokens, max_length=config.max_length)
        special = backbone.special
        self._first, self.end = [] if special.first is None else [special.first], backbone.token_end()
        for text in (*config.trained_instructions, *config.tasks.values()):
            _check_length(len(self._instruction_ids(text)) + 2, backbone)
        for number, text in enumerate(config.trained_instructions):
            self.register_buffer(f"instruction_{number}", self._instruction_ids(text), persistent=False)

    def token_vectors(
        self, ids: Int[Tensor, " tokens"], instruction: Int[Tensor, " instruction"]
    ) -> Float[Tensor, "tokens dim"]:
        """Return the vectors as in the base class, or rows of the input table if the config reads them."""
        if self.config.reads == "embeddings":
            return self.projection(self.backbone.get_input_embeddings()(ids))  # type: ignore[no-any-return,operator]
        return super().token_vectors(ids, instruction)

    def contextual(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return embeddings of complete queries by the same backbone, read as ``instruction query end``.

        This is the symmetric retriever that the token-wise query is aligned with (Eq. 5).
        """
        padded = batch.to_padded(self.pad)
        assert padded.mask is not None
        lengths, rows = padded.mask.sum(1), len(padded.ids)
        instruction = self.instruction(batch.instruction)
        start = len(instruction)
        place = padded.ids.new_full((rows, 1), self.pad)
        ids = torch.cat([instruction.expand(rows, -1), padded.ids, place], dim=1)
        ends = (start + lengths)[:, None]
        ids = ids.scatter(1, ends, self.end)
        sequences = Batch(ids, (torch.arange(ids.shape[1], device=ids.device) <= ends).long(), ends)
        states = self._states(ids, **attention_arguments(self.backbone, sequences, causal=True))
        last = states[torch.arange(rows, device=ids.device)[:, None], ends]
        return self.projection(last)  # type: ignore[no-any-return]

    def _instruction_ids(self, text: str) -> Int[Tensor, " instruction"]:
        ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return torch.tensor([*self._first, *ids], dtype=torch.long)

    @torch.inference_mode()
    def table(self, instruction: str) -> Float32[ndarray, "vocabulary dim"]:
        """Return the vector of every token of the vocabulary, read after `instruction`."""
        device = self.instruction().device
        ahead = self._instruction_ids(instruction).to(device)
        tokens = torch.arange(self.tokenizer.backend_tokenizer.get_vocab_size(), device=device)
        rows = []
        with Progress("train", total=len(tokens), unit="tokens of the table") as progress:
            for ids in tokens.split(BLOCKS * _TABLE_LINES):
                rows.append(self.token_vectors(ids, ahead).cpu().numpy())
                progress.advance(len(ids))
        return np.concatenate(rows)

    def lookup(self, instruction: str) -> LookupTower:
        """Return the lookup tower of the table of `instruction`.

        It gives the same embeddings, except that an empty query gets the table's mean.
        """
        return LookupTower(
            torch.from_numpy(self.table(instruction)),
            self.tokenizer.backend_tokenizer,
            max_length=self.config.max_length,
            storage=self.config.storage,
            made_from=self._digests(instruction),
        )

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the folder of :meth:`lookup`, and one below ``tasks`` for each further task's instruction.

        The rows always contain the adapter's effect, so `merge_adapters` is ignored.
        """
        del merge_adapters
        self.lookup(self.config.instruction).save(folder)
        trained = self.config.trained_instructions
        for name, instruction in self.config.all_tasks.items():
            if instruction not in trained:
                log.warning("no query was trained behind the instruction of the task %s", name)
            self.lookup(instruction).save(folder / TASKS / name)

    def _digests(self, instruction: str) -> dict[str, str]:
        """Return digests of all inputs of a row but the tokenizer, whose digest the table adds."""
        state = self.state_dict()
        adapter = {name for name in state if "lora_" in name}
        return {
            "weights": _digest({name: state[name] for name in state.keys() - adapter}),
            "adapter": _digest({name: state[name] for name in adapter}) if adapter else "none",
            "instruction": hashlib.sha256(instruction.encode()).hexdigest(),
        }


class TokenDocumentTower(TokenReader, Tower):
    """A document tower that reads every token by itself, a baseline (section 4.1); it is saved as a model."""

    kind = "token_documents"

    def __init__(self, backbone: Backbone, config: TowerConfig, projection: Projection) -> None:
        """Make a tower from its parts; raise ConfigError if the backbone is not causal."""
        prompt = tower_prompt(backbone, config, role="document")
        super().__init__(backbone, config, prompt, projection, role="document")
        self.packs, self.end = True, backbone.token_end()
        first = [] if backbone.special.first is None else [backbone.special.first]
        self.register_buffer("instruction_0", torch.tensor(first, dtype=torch.long), persistent=False)

    def _save_files(self, folder: Path, *, whole: bool) -> None:
        self.tokenizer.save_pretrained(folder)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")

    def _facts(self, *, layers: int | None) -> dict[str, Any]:
        tokens = {"max_length": self.config.max_length}
        return {"prompt": "", "tokens": tokens, "layers": layers, "sparse": None}


def block_mask(
    instruction: int, blocks: int, device: torch.device | None = None
) -> Bool[Tensor, "tokens tokens"]:
    """Return which token (row) attends to which (column) in a line (appendix A.5).

    A token attends to itself and to the earlier tokens of the instruction and of its block of two tokens.
    """
    block = torch.arange(blocks, device=device).repeat_interleave(2)
    block = torch.cat([block.new_full((instruction,), _INSTRUCTION), block])
    place = torch.arange(len(block), device=device)
    related = (block == _INSTRUCTION) | (block[:, None] == block)
    return related & (place[:, None] >= place)


def _check_length(tokens: int, backbone: Backbone) -> None:
    """Raise ConfigError if the instruction and a block exceed the backbone's positions or window."""
    if backbone.max_positions is not None and tokens > backbone.max_positions:
        raise ConfigError(
            f"the instruction has {tokens - 2} tokens, the backbone reads {backbone.max_positions}: "
            "shorten it"
        )
    settings: Any = backbone.model.config
    window = getattr(settings, "sliding_window", None)
    if window is not None and getattr(settings, "use_sliding_window", True) and tokens > window:
        raise ConfigError(
            f"the instruction has {tokens - 2} tokens, the backbone attends to {window}: shorten it"
        )


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
