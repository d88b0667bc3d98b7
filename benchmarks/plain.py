"""Training of a dual encoder in plain PyTorch, transformers and peft: the package must be as good.

A document's embedding is the state of SmolLM2's first layers at an end token after the text, or the mean of
the states of MiniLM's first layers; both with LoRA. benchmarks/decoders.py measures both.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import minilm, smollm
from benchmarks.pairs import Pairs

BATCH, RANK, PEAK_LR, TEMPERATURE, WARMUP = 16, 16, 5e-4, 0.02, 0.1
QUERY_TOKENS, DOCUMENT_TOKENS = 20, 48
QUERIES = 100  # held-out questions; they search all held-out answers
ENCODER_LAYERS = minilm.SMALL_LAYERS
TEACHER_STEPS, STUDENT_BATCH = 60, 64
INSTRUCTION = "Retrieve documents that answer the query: "
Read = Literal["whole", "tokens", "light both", "light documents", "encoder", "two encoders", "student"]
# Sides with tokens that are read one by one (LightRetriever, Table 4).
BY_TOKENS: Mapping[str, tuple[Read, ...]] = {
    "query": ("tokens", "light both"),
    "document": ("light both", "light documents"),
}
Figures = dict[str, Any]
Side = Callable[[Sequence[str]], torch.Tensor]  # texts -> unit vectors


def dim_of(read: Read) -> int:
    """Return the dimension of both sides: the decoder's, without a projection, or the encoder's."""
    return minilm.DIM if read in ("encoder", "two encoders", "student") else smollm.HIDDEN


class Decoder(nn.Module):
    """The state at an end token after each text, projected if the dimension differs from the model's."""

    def __init__(self, layers: int, dim: int) -> None:
        from transformers import AutoModel, AutoTokenizer

        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(smollm.path())
        self.end = self.tokenizer.convert_tokens_to_ids(smollm.END)
        model = AutoModel.from_pretrained(smollm.path(), dtype=torch.float32)
        model.layers = model.layers[:layers]
        self.model = _with_lora(model)
        self.project = nn.Identity() if dim == smollm.HIDDEN else nn.Linear(smollm.HIDDEN, dim, bias=False)

    def ids(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Return the first tokens of each text."""
        return [ids[:length] for ids in self.tokenizer(list(texts), add_special_tokens=False).input_ids]

    def states(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Compute the state of each row's end token; later pads change nothing in a causal model."""
        width = max(map(len, rows)) + 1
        ids = torch.tensor([[*row, *[self.end] * (width - len(row))] for row in rows])
        last = torch.tensor([len(row) for row in rows])
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state
        projected: torch.Tensor = self.project(hidden[torch.arange(len(rows)), last])
        return projected

    def embed(self, texts: Sequence[str], *, length: int) -> torch.Tensor:
        """Compute embeddings of the first tokens of each text, not normalised."""
        return self.states(self.ids(texts, length))

    def forward(self, texts: Sequence[str], *, length: int) -> torch.Tensor:
        """Compute unit vectors of the first tokens of each text."""
        return F.normalize(self.embed(texts, length=length), dim=1)

    def token_means(self, texts: Sequence[str], *, length: int, instruction: str) -> torch.Tensor:
        """Compute LightRetriever's queries: the mean of a text's tokens, each read after an instruction."""
        rows, ahead = self.ids(texts, length), self.ids([instruction], length)[0]
        distinct = sorted({token for row in rows for token in row})
        vectors = self.states([[*ahead, token] for token in distinct])
        place = {token: number for number, token in enumerate(distinct)}
        means = [vectors[[place[token] for token in row]].mean(0) for row in rows]
        return F.normalize(torch.stack(means), dim=1)


class Encoder(nn.Module):
    """The mean of each text's states, projected."""

    def __init__(self, dim: int) -> None:
        from transformers import AutoModel, AutoTokenizer

        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(minilm.path())
        model = AutoModel.from_pretrained(minilm.path(), dtype=torch.float32)
        model.encoder.layer = model.encoder.layer[:ENCODER_LAYERS]
        self.model = _with_lora(model)
        self.project = nn.Linear(minilm.DIM, dim, bias=False)

    def embed(self, texts: Sequence[str], *, length: int) -> torch.Tensor:
        """Compute embeddings of the first tokens of each text, not normalised."""
        cut = {"padding": True, "truncation": True, "max_length": length}
        batch = self.tokenizer(list(texts), return_tensors="pt", **cut)
        mask = batch.attention_mask[..., None]
        states = self.model(**batch).last_hidden_state
        projected: torch.Tensor = self.project((states * mask).sum(1) / mask.sum(1))
        return projected

    def forward(self, texts: Sequence[str], *, length: int) -> torch.Tensor:
        """Compute unit vectors of the first tokens of each text."""
        return F.normalize(self.embed(texts, length=length), dim=1)


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))


def train(pairs: Pairs, *, read: Read, layers: int, steps: int) -> Figures:
    """Train with in-batch negatives, and search the held-out answers before and after."""
    torch.manual_seed(0)
    dim = dim_of(read)
    reader = Encoder(dim) if read == "two encoders" else Decoder(layers, dim)
    asker = Encoder(dim) if read == "encoder" else reader
    queries: Side = partial(asker, length=QUERY_TOKENS)
    documents: Side = partial(reader, length=DOCUMENT_TOKENS)
    if isinstance(asker, Decoder) and read in BY_TOKENS["query"]:
        queries = partial(asker.token_means, length=QUERY_TOKENS, instruction=INSTRUCTION)
    if isinstance(reader, Decoder) and read in BY_TOKENS["document"]:
        documents = partial(reader.token_means, length=DOCUMENT_TOKENS, instruction="")
    before = recalls(pairs, queries, documents)
    losses = _contrast(pairs, queries, documents, nn.ModuleList([asker, reader]), steps)
    return {"R@10 before": before["dense R@10"]} | described(losses) | recalls(pairs, queries, documents)


def _contrast(pairs: Pairs, queries: Side, documents: Side, model: nn.Module, steps: int) -> dict[int, float]:
    order = random.Random(0).sample(pairs.train, k=min(len(pairs.train), BATCH * steps))

    def loss(step: int) -> torch.Tensor:
        batch = order[BATCH * step : BATCH * (step + 1)]
        scores = queries([q for q, _ in batch]) @ documents([d for _, d in batch]).T / TEMPERATURE
        return F.cross_entropy(scores, torch.arange(len(batch)))

    return _minimise(loss, model, steps, lr=PEAK_LR)


def _minimise(
    loss_of: Callable[[int], torch.Tensor], model: nn.Module, steps: int, *, lr: float
) -> dict[int, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = {}
    for step in range(steps):
        rise, fall = (step + 1) / (WARMUP * steps), (steps - step) / ((1 - WARMUP) * steps)
        optimizer.param_groups[0]["lr"] = lr * min(rise, fall)
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step + 1] = float(loss.detach())
    return losses


def distil(pairs: Pairs, *, layers: int, steps: int) -> Figures:
    """Train a decoder for both sides, then an encoder on its embeddings of the training queries.

    The loss is ScalingNote's (Eq. 15), on embeddings that are not normalised. `R@10 before` is the teacher's.
    """
    torch.manual_seed(0)
    decoder = Decoder(layers, minilm.DIM)
    queries, documents = partial(decoder, length=QUERY_TOKENS), partial(decoder, length=DOCUMENT_TOKENS)
    _contrast(pairs, queries, documents, decoder, TEACHER_STEPS)
    teacher = recalls(pairs, queries, documents)
    texts = [*dict.fromkeys(question for question, _ in pairs.train)]
    starts = range(0, len(texts), STUDENT_BATCH)
    with torch.no_grad():
        of_texts = [decoder.embed(texts[n : n + STUDENT_BATCH], length=QUERY_TOKENS) for n in starts]
    wanted, student, drawn = torch.cat(of_texts), Encoder(minilm.DIM), random.Random(0)

    def loss(_: int) -> torch.Tensor:
        batch = drawn.sample(range(len(texts)), STUDENT_BATCH)
        found, own = student.embed([texts[n] for n in batch], length=QUERY_TOKENS), wanted[batch]
        return ((found - own).square().sum(1) - F.cosine_similarity(found, own)).mean()

    losses = _minimise(loss, student, steps, lr=smollm.STUDENT_LR)
    found = described(losses) | recalls(pairs, partial(student, length=QUERY_TOKENS), documents)
    return {"R@10 before": teacher["dense R@10"]} | found


@torch.no_grad()
def recalls(pairs: Pairs, queries: Side, documents: Side) -> Figures:
    """Measure R@1 and R@10 of held-out questions among all held-out answers."""
    answers = [answer for _, answer in pairs.held_out]
    pool = torch.cat([documents(answers[start : start + 32]) for start in range(0, len(answers), 32)])
    vectors = queries([question for question, _ in pairs.held_out[:QUERIES]])
    return recalls_of("dense", vectors.numpy() @ pool.numpy().T)


def recalls_of(what: str, scores: np.ndarray) -> Figures:
    """Return R@1 and R@10; the answer to question i is number i."""
    ranks = (scores > np.diagonal(scores)[:, None]).sum(1)
    return {f"{what} R@{k}": round(float((ranks < k).mean()), 3) for k in (1, 10)}


def described(losses: Mapping[int, float]) -> Figures:
    """Return means of the contrastive loss over the ten steps up to 20, 40, 60 and the last one."""
    means = {}
    for step in (20, 40, 60, max(losses)):
        near = [loss for at, loss in losses.items() if step - 10 < at <= step]
        if step <= max(losses):
            name = "loss at end" if step == max(losses) else f"loss at {step}"
            means[name] = round(float(np.mean(near)), 3)
    return means
