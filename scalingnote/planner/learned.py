"""A small encoder that predicts the importance of words (DeepCT, Dai and Callan 2019), and its targets.

    words  -> tokens   [queries, tokens]           each word is tokenised alone, so that it owns its tokens
           -> hidden   [queries, tokens, hidden]   the encoder reads the whole query
           -> logits   [queries, tokens]           one weight vector
           -> scores   [terms]                     sigmoid at the first token of each distinct word

DeepCT regresses the target with a squared error and clips scores to [0, 1]. Here a sigmoid bounds them, so
that scores do not tie at the ends; it is trained with cross entropy, which has the same minimum.

The target is DeepCT's query term recall r, the share of a query's positives that have the word: a word that
chosen documents repeat is one the query is about, unlike "how", "please" or "near me". Stop words are in all
documents, chosen or not. DeepCT removes them by a list; here the recall that chance explains is subtracted:

    recall r   = share of the query's positives that have the word
    chance c   = share of the other queries' positives that have it
    target     = max(0, r - c)

Dividing by 1 - c (Cohen's kappa) would give "the" a target of 1 whenever a query's only positive has it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Float32, Int, UInt64
from numpy import ndarray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from scalingnote.errors import ArtifactError, ConfigError, TrainingError
from scalingnote.log import Progress
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone, train_tokenizer
from scalingnote.models.config import Scratch
from scalingnote.planner.config import Learned
from scalingnote.storage.shuffle import hash_of

PAIR = ["query_id", "doc_id"]
NOT_READ = -1  # position of a word behind the last token that the encoder reads
_QUERIES_PER_BATCH = 256
_ROWS_BEFORE_FOLD = 1 << 20


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
            raise ConfigError("the planner's backbone reads one way only: name a bidirectional encoder")
        if backbone.max_positions is not None and max_length > backbone.max_positions:
            raise ConfigError(
                f"max_length={max_length}, but the backbone reads {backbone.max_positions} tokens: lower it"
            )
        self.backbone = backbone.model
        self.head = nn.utils.skip_init(nn.Linear, backbone.hidden, 1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)  # every score starts at 1/2
        self.tokenizer, self._special, self._max_length = backbone.tokenizer, backbone.special, max_length
        self._tokens = backbone.raw_tokenizer
        self._tokens.no_padding()
        self._tokens.no_truncation()

    def rows(self, texts: Sequence[Sequence[str]]) -> list[TermTokens]:
        """Token rows of texts given as words."""
        unique = list(dict.fromkeys(word for text in texts for word in text))
        # Byte-level vocabularies have words with the space before them.
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
        """Logits of the distinct words of all rows; undefined for words that are not read."""
        ids, mask = self._pad(rows)
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        places = [
            i * ids.shape[1] + max(position, 0) for i, row in enumerate(rows) for position in row.positions
        ]
        at = torch.tensor(places, dtype=torch.long, device=ids.device)
        return self.head(hidden.flatten(0, 1)[at].float()).squeeze(-1)  # type: ignore[no-any-return]

    def _pad(
        self, rows: Sequence[TermTokens]
    ) -> tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]:
        longest = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), longest), self._special.pad)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
            mask[i, : len(row.ids)] = 1
        device = self.head.weight.device
        return ids.to(device), mask.to(device)

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[str]]) -> Float32[ndarray, " terms"]:
        """Importances of the distinct words of each text; 0 for a word the encoder does not read."""
        rows = self.rows(texts)
        scores = [np.zeros(0, dtype=np.float32)] * len(rows)
        # Sorted by length, so that little of a batch is padding.
        order = sorted((i for i in range(len(rows)) if texts[i]), key=lambda i: len(rows[i].ids))
        for start in range(0, len(order), _QUERIES_PER_BATCH):
            chosen = order[start : start + _QUERIES_PER_BATCH]
            logits = self([rows[i] for i in chosen])
            sizes = [len(rows[i].positions) for i in chosen]
            for i, values in zip(chosen, torch.sigmoid(logits).cpu().split(sizes), strict=True):
                read = np.array(rows[i].positions) != NOT_READ
                scores[i] = np.where(read, values.numpy(), np.float32(0))
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
        """Read a folder written by :meth:`save`; ArtifactError when it is not one."""
        try:
            head = load_file(folder / "head.safetensors")
        except FileNotFoundError:
            raise ArtifactError(f"{folder} is not a planner's encoder: head.safetensors is missing") from None
        model = cls(backbones.load(folder), max_length=max_length)
        model.head.load_state_dict(head)
        return model.eval()


def build_regressor(config: Learned, texts: Sequence[Sequence[str]]) -> TermRegressor:
    """An untrained model; a scratch backbone learns its tokenizer from `texts`."""
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
    steps = config.epochs * -(-len(rows) // config.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(step, steps, config.warmup)
    )
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
                read = torch.tensor([p != NOT_READ for row in batch for p in row.positions], device=device)
                target = torch.from_numpy(np.concatenate([targets[i] for i in chosen])).to(device)
                loss = binary_cross_entropy_with_logits(model(batch)[read], target[read])
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
    """Every row once, in an order that depends on the seed and the epoch."""
    order = np.random.Generator(np.random.Philox(key=[config.seed, epoch])).permutation(rows).tolist()
    for start in range(0, rows, config.batch):
        yield order[start : start + config.batch]


def _learning_rate_factor(step: int, steps: int, warmup: float) -> float:
    rising = max(round(steps * warmup), 1)
    return (step + 1) / rising if step < rising else (steps - step) / max(steps - rising, 1)


def sample_queries(queries: Iterable[pa.Table], size: int, *, seed: int) -> pa.Table:
    """A uniform sample of `size` rows: those whose seeded hash of query_id is smallest, in its order.

    The result does not depend on the order of the tables. At most 2 x `size` rows and one table are held.
    """
    kept: list[pa.Table] = []
    for table in queries:
        kept.append(table.append_column("key", pa.array(_random_keys(table["query_id"], seed=seed))))
        if sum(map(len, kept)) > 2 * size:
            kept = [_smallest(kept, size)]
    return _smallest(kept, size).drop_columns("key")


def sample_positives(pairs: Iterable[pa.Table], *, most: int, seed: int) -> pa.Table:
    """Distinct (query_id, doc_id) pairs, a uniform sample of at most `most` per query, sorted.

    At most twice the sampled pairs are held, however many clicks there are.
    """
    kept: list[pa.Table] = [pa.table({name: pa.array([], pa.string()) for name in PAIR})]
    for table in pairs:
        kept.append(table.select(PAIR))
        if sum(map(len, kept[1:])) > max(len(kept[0]), _ROWS_BEFORE_FOLD):
            kept = [_sample_per_query(pa.concat_tables(kept), most, seed=seed)]
    return _sample_per_query(pa.concat_tables(kept), most, seed=seed)


def term_recall(
    queries: Sequence[Sequence[str]],
    queries_of: Mapping[str, Sequence[int]],
    documents: Iterable[tuple[str, Sequence[str]]],
    *,
    against_chance: bool = True,
) -> list[Float32[ndarray, " _"] | None]:
    """The target of each distinct word of each query (see the docstring of the module).

    Args:
        queries: the words of each query.
        queries_of: doc_id -> the queries (indices) of which it is a positive.
        documents: (doc_id, words) of positives; they are streamed.
        against_chance: subtract chance; else the target is plain recall.

    Returns:
        An array per query, or None for a query without a positive among the documents.
    """
    distinct = [list(dict.fromkeys(query)) for query in queries]
    vocabulary = {word for query in distinct for word in query}
    hits_of = [np.zeros(len(query)) for query in distinct]  # positives of the query with each word
    positives_of = [0] * len(distinct)
    df: Counter[str] = Counter()
    count = 0
    for doc_id, text in documents:
        present = vocabulary.intersection(text)
        df.update(present)
        count += 1
        for row in queries_of.get(doc_id, ()):
            hits_of[row] += [word in present for word in distinct[row]]
            positives_of[row] += 1
    targets: list[Float32[ndarray, " _"] | None] = []
    for query, hits, positives in zip(distinct, hits_of, positives_of, strict=True):
        recall = hits / max(positives, 1)
        if against_chance and count > positives:
            chance = (np.array([df[word] for word in query]) - hits) / (count - positives)
            recall = np.maximum(recall - chance, 0)
        targets.append(recall.astype(np.float32) if positives else None)
    return targets


def _smallest(tables: Sequence[pa.Table], size: int) -> pa.Table:
    return pa.concat_tables(tables).sort_by([("key", "ascending"), ("query_id", "ascending")]).slice(0, size)


def _sample_per_query(pairs: pa.Table, most: int, *, seed: int) -> pa.Table:
    pairs = pairs.group_by(PAIR).aggregate([])
    if not pairs.num_rows:
        return pairs
    keys = _random_keys(pc.binary_join_element_wise(pairs["query_id"], pairs["doc_id"], " "), seed=seed)
    table = pairs.append_column("key", pa.array(keys))
    table = table.sort_by([("query_id", "ascending"), ("key", "ascending"), ("doc_id", "ascending")])
    ids = np.asarray(table["query_id"].combine_chunks().dictionary_encode().indices)
    first = np.flatnonzero(np.diff(ids, prepend=-1))
    rank = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    kept = table.filter(pa.array(rank < most)).select(PAIR)
    return kept.sort_by([("query_id", "ascending"), ("doc_id", "ascending")])


def _random_keys(ids: pa.ChunkedArray, *, seed: int) -> UInt64[ndarray, " ids"]:
    return hash_of(pa.array([f"{seed} {value}" for value in ids.to_pylist()], pa.string()))
