"""LightRetriever's query tower: each token encoded alone behind an instruction, then averaged (section 2.2).

    line        [instruction | token end | token end | ...]   the instruction once, then blocks
    mask        a block sees the instruction and itself       (appendix A.5); positions restart in each block
    vectors     [tokens, dim]     states at the end tokens, projected (Eq. 3)
    embedding   [queries, 1, dim] their mean over a query's tokens (Eq. 4)

The vector of a token does not depend on the rest of its query. So a batch encodes each distinct token once,
many per line, and encoding the whole vocabulary gives the table that is saved: a lookup tower (Eq. 6).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from numpy import ndarray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import Progress, get_logger
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, attention_arguments, choose_attention, first_position
from scalingnote.models.config import TokenWiseConfig, TowerConfig
from scalingnote.models.lookup import LookupPrompt, LookupTower, from_table
from scalingnote.models.prompt import TokenDocuments, without_limits
from scalingnote.models.published_model import write_json
from scalingnote.models.tower import Projection, Tower

log = get_logger("train")
BLOCKS = 32  # per line: 64 tokens, about twice an instruction, so that the instruction costs little
TOKEN_DOCUMENTS = "token_documents"  # kind of a saved tower that reads the tokens of documents alone
TASKS = "tasks"  # subfolder of a saved tower: a lookup tower for each further instruction
_TABLE_LINES = 64  # per forward pass, when the table is computed
_INSTRUCTION = -1  # the block number of the instruction's tokens


class TokenReader(nn.Module):
    """A tower that reads tokens alone; the base of those of queries and of documents."""

    backbone: nn.Module
    projection: Projection
    instruction: Int[Tensor, " instruction"]  # tokens read once, before every token
    end: int  # the token behind every token, whose state is its vector

    def mean_vectors(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return float32 embeddings, not normalised, of padded or packed rows; 0 for a row without tokens."""
        ids, lengths = batch.flat()
        # More than half of a batch's tokens are repeated: each distinct one is encoded once.
        distinct, place = ids.unique(return_inverse=True)
        if not len(distinct):  # every rank needs a forward pass: gathering sharded weights is collective
            distinct = self.instruction.new_tensor([self.end])
        vectors = self.token_vectors(distinct, self.read_behind(batch))
        return F.embedding_bag(place, vectors, lengths.cumsum(0) - lengths, mode="mean")[:, None]

    def read_behind(self, batch: Batch) -> Int[Tensor, " instruction"]:
        """Return the tokens that those of a batch are read behind."""
        del batch
        return self.instruction

    def token_vectors(
        self, ids: Int[Tensor, " tokens"], instruction: Int[Tensor, " instruction"] | None = None
    ) -> Float[Tensor, "tokens dim"]:
        """Return the vector of each token from one forward pass over as many lines as needed.

        They are read behind the tokens of an `instruction`; None: the tower's own.
        """
        instruction = self.instruction if instruction is None else instruction
        lines = -(-len(ids) // BLOCKS)
        blocks, start = -(-len(ids) // lines), len(instruction)
        # The last line is filled with repeated tokens, so that no line has pads and one mask serves all.
        filled = torch.cat([ids, ids[-1:].expand(lines * blocks - len(ids))]).view(lines, blocks)
        pairs = torch.stack([filled, torch.full_like(filled, self.end)], dim=2).flatten(1)
        device = ids.device
        within = torch.arange(start, start + 2, device=device).repeat(blocks)
        positions = torch.cat([torch.arange(start, device=device), within])[None]
        states = self._states(
            torch.cat([instruction.expand(lines, -1), pairs], dim=1),
            attention_mask=self._mask(start, blocks),
            position_ids=positions + first_position(self.backbone),
        )
        ends = states[:, start + 1 :: 2].flatten(0, 1)[: len(ids)]
        return self.projection(ends)  # type: ignore[no-any-return]

    def _mask(self, instruction: int, blocks: int) -> Tensor:
        """Return the block mask in the form of the backbone's attention: boolean, or added to the scores."""
        sees = block_mask(instruction, blocks, self.instruction.device)[None, None]
        if self.backbone.config._attn_implementation != "eager":  # type: ignore[union-attr]
            return sees
        dtype: torch.dtype = self.backbone.dtype  # type: ignore[assignment]
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(
            ~sees, torch.finfo(dtype).min
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
        self._first, self.end = [] if special.first is None else [special.first], _end_token(backbone)
        for text in (*config.trained_instructions, *config.tasks.values()):
            _check_length(len(self._instruction_ids(text)) + 2, backbone)
        self.register_buffer("instruction", self._instruction_ids(config.instruction), persistent=False)
        for number, text in enumerate(config.trained_instructions):
            self.register_buffer(f"instruction_{number}", self._instruction_ids(text), persistent=False)

    def forward(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return float32 embeddings, not normalised, of padded or packed rows; 0 for a row without tokens."""
        return self.mean_vectors(batch)

    def token_vectors(
        self, ids: Int[Tensor, " tokens"], instruction: Int[Tensor, " instruction"] | None = None
    ) -> Float[Tensor, "tokens dim"]:
        """As the base class; or, where the config reads embeddings, rows of the input table."""
        if self.config.reads == "embeddings":
            return self.projection(self.backbone.get_input_embeddings()(ids))  # type: ignore[no-any-return,operator]
        return super().token_vectors(ids, instruction)

    def read_behind(self, batch: Batch) -> Int[Tensor, " instruction"]:
        """Return the tokens of the instruction that a batch names by its number."""
        return getattr(self, f"instruction_{batch.instruction}")  # type: ignore[no-any-return]

    def contextual(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return embeddings of whole queries by the same backbone, read as ``instruction query end``.

        This is the symmetric retriever that the token-wise query is aligned with (Eq. 5).
        """
        padded = batch.to_padded(self.pad)
        assert padded.mask is not None
        lengths, rows = padded.mask.sum(1), len(padded.ids)
        instruction = self.read_behind(batch)
        start = len(instruction)
        place = padded.ids.new_full((rows, 1), self.pad)
        ids = torch.cat([instruction.expand(rows, -1), padded.ids, place], dim=1)
        ends = (start + lengths)[:, None]
        ids = ids.scatter(1, ends, self.end)
        whole = Batch(ids, (torch.arange(ids.shape[1], device=ids.device) <= ends).long(), ends)
        states = self._states(ids, **attention_arguments(self.backbone, whole, causal=True))
        last = states[torch.arange(rows, device=ids.device)[:, None], ends]
        return self.projection(last)  # type: ignore[no-any-return]

    def _instruction_ids(self, text: str) -> Int[Tensor, " instruction"]:
        ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return torch.tensor([*self._first, *ids], dtype=torch.long)

    @torch.inference_mode()
    def table(self, instruction: str) -> Float32[ndarray, "vocabulary dim"]:
        """Return the vector of every token of the vocabulary, read behind `instruction`."""
        device = self.instruction.device
        ahead = self._instruction_ids(instruction).to(device)
        tokens = torch.arange(self.tokenizer.backend_tokenizer.get_vocab_size(), device=device)
        rows = []
        with Progress("train", total=len(tokens), unit="tokens of the table") as progress:
            for ids in tokens.split(BLOCKS * _TABLE_LINES):
                rows.append(self.token_vectors(ids, ahead).cpu().numpy())
                progress.advance(len(ids))
        return np.concatenate(rows)

    def lookup(self, instruction: str | None = None) -> LookupTower:
        """Return the lookup tower with the same embeddings, but an empty query gets the table's mean.

        Its tokens are read behind `instruction`; None: the tower's own.
        """
        instruction = self.config.instruction if instruction is None else instruction
        return from_table(
            self.table(instruction),
            self.tokenizer.backend_tokenizer,
            max_length=self.config.max_length,
            storage=self.config.storage,
            made_from=self._digests(instruction),
        )

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the folder of :meth:`lookup`, and one below ``tasks`` for each further task's instruction.

        Their rows contain the adapter in any case.
        """
        del merge_adapters
        self.lookup().save(folder)
        trained = self.config.trained_instructions
        for name, instruction in self.config.all_tasks.items():
            if instruction not in trained:
                log.warning("no query was trained behind the instruction of the task %s", name)
            self.lookup(instruction).save(folder / TASKS / name)

    def _digests(self, instruction: str) -> dict[str, str]:
        """Return digests of everything that a row depends on but the tokenizer, which the table adds."""
        state = self.state_dict()
        adapter = {name for name in state if "lora_" in name}
        return {
            "weights": _digest({name: state[name] for name in state.keys() - adapter}),
            "adapter": _digest({name: state[name] for name in adapter}) if adapter else "none",
            "instruction": hashlib.sha256(instruction.encode()).hexdigest(),
        }


class TokenDocumentTower(TokenReader, Tower):
    """A document tower that reads tokens alone, to compare with (section 4.1); it is kept as a model."""

    prompt: TokenDocuments

    def __init__(
        self, backbone: Backbone, config: TowerConfig, *, dim: int, adapter: str | None = None
    ) -> None:
        """Build a tower on `backbone`; for `adapter` see :class:`Tower`. ConfigError if it is not causal."""
        nn.Module.__init__(self)
        self._set_backbone(backbone, config, role="document", adapter=adapter)
        self.projection, self.sparse, self.dim = Projection(backbone.hidden, dim), None, dim
        self.special, self.pad, self.packs = backbone.special, backbone.special.pad, True
        self.end = _end_token(backbone)
        self.prompt = TokenDocuments(backbone.raw_tokenizer, max_length=config.max_length)
        first = [] if backbone.special.first is None else [backbone.special.first]
        self.register_buffer("instruction", torch.tensor(first, dtype=torch.long), persistent=False)

    def _read(self, batch: Batch, *, terms: bool) -> tuple[Tensor, Tensor | None]:
        assert not terms, "tokens alone have no term weights"
        return self.mean_vectors(batch), None

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the tower's folder; adapters are merged or kept as by :meth:`Tower.save`."""
        base_config = self._save_backbone(folder, merge_adapters=merge_adapters)
        self.tokenizer.save_pretrained(folder)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")
        facts = {
            "kind": TOKEN_DOCUMENTS,
            **self._facts,
            "prompt": "",
            "tokens": {"max_length": self.config.max_length},
            "layers": None if base_config is None else base_config.layers,
            "sparse": None,
        }
        write_json(folder / "tower.json", facts)


def load_documents(
    folder: Path, facts: Mapping[str, Any], *, dtype: torch.dtype = torch.float32
) -> TokenDocumentTower:
    """Read a folder of :meth:`TokenDocumentTower.save`, the backbone in `dtype`; `facts`: its tower.json."""
    config = TowerConfig(max_length=facts["max_length"], reads="tokens")
    backbone = backbones.load(folder, layers=facts["layers"], dtype=dtype)
    tower = TokenDocumentTower(backbone, config, dim=facts["dim"])
    with torch.no_grad():
        tower.projection.weight.copy_(load_file(folder / "projection.safetensors")["weight"])
    return tower.eval()


def _end_token(backbone: Backbone) -> int:
    end = backbone.special.end
    if not backbone.causal or end is None:
        raise ConfigError(
            "a tower that reads tokens alone needs a causal backbone with an end-of-sequence token"
        )
    return end


def block_mask(
    instruction: int, blocks: int, device: torch.device | None = None
) -> Bool[Tensor, "tokens tokens"]:
    """Return which token (row) sees which (column) in a line (appendix A.5).

    A token sees itself and the earlier tokens of the instruction and of its own block of two tokens.
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
            f"the instruction takes {tokens - 2} tokens, the backbone reads {backbone.max_positions}: "
            "shorten it"
        )
    settings: Any = backbone.model.config
    window = getattr(settings, "sliding_window", None)
    if window is not None and getattr(settings, "use_sliding_window", True) and tokens > window:
        raise ConfigError(
            f"the instruction takes {tokens - 2} tokens, layers of the backbone see {window}: shorten it"
        )


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
