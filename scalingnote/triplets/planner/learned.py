"""A small encoder that predicts the importance of words (DeepCT, Dai and Callan 2019).

    words  -> tokens   [queries, tokens]           each word is tokenised separately: no token spans two words
           -> hidden   [queries, tokens, hidden]   the encoder reads the complete query
           -> logits   [queries, tokens]           one weight vector
           -> scores   [terms]                     sigmoid at the first token of each distinct word

DeepCT regresses the target with a squared error and clips scores to [0, 1]. Here a sigmoid bounds them, so
that scores are not equal at the ends; it is trained with cross entropy, which has the same minimum.

The targets are those of :mod:`scalingnote.triplets.planner.examples`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from numpy import ndarray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence

from scalingnote.core.errors import ArtifactError, ConfigError, TrainingError
from scalingnote.core.log import Progress
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone, train_tokenizer
from scalingnote.models.config import Scratch
from scalingnote.models.prompt import without_limits
from scalingnote.triplets.config import Learned

NOT_READ = -1  # position of a word after the last token that the encoder reads
_QUERIES_PER_BATCH = 256
BATCH_QUERIES = 64  # per training step
WARMUP = 0.1  # share of the steps


@dataclass(frozen=True)
class TermTokens:
    """Token ids of one query, and the position of the first token of each distinct word."""

    ids: list[int]
    positions: list[int]


class TermRegressor(nn.Module):
    """An encoder with one output per token, and its tokenizer."""

    def __init__(self, backbone: Backbone, *, max_length: int) -> None:
        super().__init__()
        if backbone.causal:
            raise ConfigError(
                "the planner's backbone reads only in one direction: set a bidirectional encoder"
            )
        if backbone.max_positions is not None and max_length > backbone.max_positions:
            raise ConfigError(
                f"max_length={max_length}, but the backbone reads {backbone.max_positions} tokens: lower it"
            )
        self.backbone = backbone.model
        self.head = nn.utils.skip_init(nn.Linear, backbone.hidden, 1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)  # every score starts at 1/2
        self.tokenizer, self._special, self._max_length = backbone.tokenizer, backbone.special, max_length
        self._tokens = without_limits(backbone.raw_tokenizer)

    def rows(self, texts: Sequence[Sequence[str]]) -> list[TermTokens]:
        """Tokenise texts, which are lists of words."""
        unique = list(dict.fromkeys(word for text in texts for word in text))
        # Byte-level vocabularies have words together with the space before them.
        encoded = self._tokens.encode_batch_fast([f" {word}" for word in unique], add_special_tokens=False)
        ids_of = {word: encoding.ids for word, encoding in zip(unique, encoded, strict=True)}
        return [self._row(text, ids_of) for text in texts]

    def _row(self, text: Sequence[str], ids_of: dict[str, list[int]]) -> TermTokens:
        ids = [] if self._special.first is None else [self._special.first]
        tail = [] if self._special.end is None else [self._special.end]
        position: dict[str, int] = {}
        for word in text:
            pieces = ids_of[word][: self._max_length - len(tail) - len(ids)]
            if pieces:
                position.setdefault(word, len(ids))
            ids += pieces
        return TermTokens(ids + tail, [position.get(word, NOT_READ) for word in dict.fromkeys(text)])

    def forward(self, rows: Sequence[TermTokens]) -> Float[Tensor, " terms"]:
        """Compute logits of the distinct words of all rows; undefined for words that are not read."""
        device = self.head.weight.device
        tokens = [torch.tensor(row.ids, dtype=torch.long) for row in rows]
        ids = pad_sequence(tokens, batch_first=True, padding_value=self._special.pad).to(device)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True).to(device)
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        places = [
            i * ids.shape[1] + max(position, 0) for i, row in enumerate(rows) for position in row.positions
        ]
        at = torch.tensor(places, dtype=torch.long, device=device)
        return self.head(hidden.flatten(0, 1)[at].float()).squeeze(-1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[str]]) -> Float32[ndarray, " terms"]:
        """Compute importances of the distinct words of each text; 0 for a word that is not read."""
        rows = self.rows(texts)
        scores = [np.zeros(0, dtype=np.float32)] * len(rows)
        # Sorted by length, so that a batch has little padding.
        order = sorted((i for i in range(len(rows)) if texts[i]), key=lambda i: len(rows[i].ids))
        for start in range(0, len(order), _QUERIES_PER_BATCH):
            chosen = order[start : start + _QUERIES_PER_BATCH]
            logits = self([rows[i] for i in chosen])
            sizes = [len(rows[i].positions) for i in chosen]
            for i, values in zip(chosen, torch.sigmoid(logits).cpu().split(sizes), strict=True):
                is_read = np.array(rows[i].positions) != NOT_READ
                scores[i] = np.where(is_read, values.numpy(), np.float32(0))
        return np.concatenate([np.zeros(0, dtype=np.float32), *scores])

    def save(self, folder: Path) -> None:
        """Write the encoder, its tokenizer and the head."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        head = {name: value.detach().contiguous() for name, value in self.head.state_dict().items()}
        save_file(head, folder / "head.safetensors")

    @classmethod
    def load(cls, folder: Path, *, max_length: int) -> "TermRegressor":
        """Read a folder that :meth:`save` wrote; raise ArtifactError if it is another folder."""
        try:
            head = load_file(folder / "head.safetensors")
        except FileNotFoundError:
            raise ArtifactError(f"{folder} is not a planner's encoder: head.safetensors is missing") from None
        model = cls(backbones.load(folder), max_length=max_length)
        model.head.load_state_dict(head)
        return model.eval()


def build_regressor(config: Learned, texts: Sequence[Sequence[str]]) -> TermRegressor:
    """Build an untrained model; the tokenizer of a scratch backbone is trained on `texts`."""
    tokenizer = None
    if isinstance(config.backbone, Scratch):
        joined = (" " + " ".join(text) for text in texts)
        tokenizer = train_tokenizer(joined, vocabulary=config.backbone.vocabulary)
    backbone = backbones.build(config.backbone, tokenizer_json=tokenizer, seed=config.seed)
    return TermRegressor(backbone, max_length=config.max_length)


def fit_regressor(
    model: TermRegressor,
    texts: Sequence[Sequence[str]],
    targets: Sequence[Float32[ndarray, " _"]],
    *,
    config: Learned,
) -> list[float]:
    """Train `model` on the targets of the texts' distinct words.

    Returns:
        The mean loss of each epoch.

    Raises:
        TrainingError: the loss is not finite.
    """
    rows = model.rows(texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.peak_lr)
    steps = config.epochs * -(-len(rows) // BATCH_QUERIES)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, steps))
    device = model.head.weight.device
    losses = []
    model.train()
    progress = Progress("planner", total=config.epochs * len(rows), unit="queries")
    with torch.random.fork_rng(), progress:
        torch.manual_seed(config.seed)  # of dropout
        for epoch in range(config.epochs):
            total = 0.0
            for chosen in _batches(len(rows), config, epoch=epoch):
                batch = [rows[i] for i in chosen]
                is_read = torch.tensor([p != NOT_READ for row in batch for p in row.positions], device=device)
                target = torch.from_numpy(np.concatenate([targets[i] for i in chosen])).to(device)
                loss = binary_cross_entropy_with_logits(model(batch)[is_read], target[is_read])
                if not torch.isfinite(loss):
                    raise TrainingError(f"the planner's loss is {loss:g} in epoch {epoch}: lower peak_lr")
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                total += loss.item() * len(chosen)
                progress.advance(len(chosen), f"loss {loss:.4f}")
            losses.append(total / len(rows))
    model.eval()
    return losses


def _batches(rows: int, config: Learned, *, epoch: int) -> Iterator[list[int]]:
    """Yield batches with every row once, in an order that depends on the seed and the epoch."""
    order = np.random.Generator(np.random.Philox(key=[config.seed, epoch])).permutation(rows).tolist()
    for start in range(0, rows, BATCH_QUERIES):
        yield order[start : start + BATCH_QUERIES]


def _learning_rate_factor(step: int, steps: int) -> float:
    rising = max(round(steps * WARMUP), 1)
    return (step + 1) / rising if step < rising else (steps - step) / max(steps - rising, 1)
