"""One training step, ours and sentence-transformers', on the same towers, rows and optimizer.

Both have a query and a document tower, start from the same weights, and learn one view of a document with one
hard negative: cross entropy in both directions over all Matryoshka prefixes, through GradCache. So their
losses are equal; :func:`measure_in_turns` returns the first one as evidence.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
)

from benchmarks.report import peak_memory_mb
from scalingnote.models import dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import Lora, Pretrained, Stored, TowerConfig
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.prompt import TokenRow
from scalingnote.train import strategies
from scalingnote.train.config import GradCache, Losses, Memory, Optimizer, Ranks, Schedule
from scalingnote.train.grad_cache import cached_backward
from scalingnote.train.objective import StageOne, Triplets

DIM, DIMS = 128, (16, 32, 64, 128)
TEMPERATURE, RATE, CLIP, DECAY = 0.05, 1e-4, 1.0, 1e-3
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]
Architecture = Literal["bert", "qwen2"]
Side = Literal["ours", "sentence-transformers"]


@dataclass(frozen=True)
class Size:
    """Sizes of the backbone and of its inputs."""

    layers: int = 4
    hidden: int = 256
    vocabulary: int = 8192
    query_tokens: float = 12.0  # means; lengths are log-normal
    document_tokens: float = 64.0
    longest: int = 192


@dataclass(frozen=True)
class Setting:
    """One measurement. `chunks`: rows that GradCache encodes at once, of queries and of documents.

    sentence-transformers has one number for both or, with `budget`, a number of tokens.
    """

    side: Side
    batch: int
    chunks: tuple[int, int] = (32, 32)
    budget: int | None = None
    spread: float = 0.5  # of the logarithm of lengths; 0: all equal
    plain: bool = False  # one loss of one direction, the complete batch at once
    base: Stored | None = None  # of LoRA towers on one backbone; None: all weights of two backbones learn


def save_backbone(folder: Path, architecture: Architecture, size: Size) -> None:
    """Save a backbone with random weights and its tokenizer like any Hugging Face model."""
    torch.manual_seed(0)
    words = [*SPECIAL, *(f"w{number}" for number in range(size.vocabulary - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    shape: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": 4 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": max(size.hidden // 64, 1),
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    if architecture == "bert":
        shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model: Any = BertModel(BertConfig(**shape), add_pooling_layer=False)
    else:
        model = Qwen2Model(Qwen2Config(**shape, num_key_value_heads=max(size.hidden // 128, 1)))
    model.save_pretrained(folder)
    save_file({"weight": torch.randn(DIM, size.hidden) * size.hidden**-0.5}, folder / "projection.st")


def measure_peak_mb(folder: str, size: Size, setting: Setting) -> float:
    """Measure the peak memory of this process after one step."""
    torch.set_num_threads(1)
    _step(Path(folder), size, setting)(0)
    return peak_memory_mb()


def measure_in_turns(
    folder: str, size: Size, settings: Sequence[Setting], *, steps: int
) -> list[dict[str, Any]]:
    """Measure the loss of a first step of each setting, and the processor seconds of each further one.

    The settings take turns step by step, so that other work on the machine affects all of them equally.
    """
    torch.set_num_threads(1)
    step_functions = [_step(Path(folder), size, setting) for setting in settings]
    measurements: list[dict[str, Any]] = [{"loss": step(0), "cpu s": []} for step in step_functions]
    for number in range(1, steps + 1):
        for step, figures in zip(step_functions, measurements, strict=True):
            start = time.process_time()
            step(number)
            figures["cpu s"].append(time.process_time() - start)
    return measurements


def _step(folder: Path, size: Size, setting: Setting) -> Callable[[int], float]:
    return (_ours if setting.side == "ours" else _theirs)(folder, size, setting)


def rows(size: Size, setting: Setting, number: int, *, causal: bool) -> list[list[TokenRow]]:
    """Draw queries, positives and negatives of a step, with the special tokens of the backbone."""
    rng = np.random.default_rng(number)
    means = (size.query_tokens, size.document_tokens, size.document_tokens)
    return [list(_texts(rng, setting, mean, size, causal)) for mean in means]


def _texts(
    rng: np.random.Generator, setting: Setting, mean: float, size: Size, causal: bool
) -> Iterator[TokenRow]:
    # The log-normal's mean is exp(mu + spread^2 / 2).
    mu = np.log(mean) - setting.spread**2 / 2
    for length in rng.lognormal(mu, setting.spread, setting.batch).round().clip(3, size.longest).astype(int):
        words = rng.integers(len(SPECIAL), size.vocabulary, length - (1 if causal else 2)).tolist()
        if causal:
            yield TokenRow([*words, SPECIAL.index("[EOS]")], [int(length) - 1])
        else:
            yield TokenRow([SPECIAL.index("[CLS]"), *words, SPECIAL.index("[SEP]")], [0])


def frozen_mb(folder: str, size: Size, base: Stored) -> float:
    """Count megabytes of the frozen layers below the adapters of both towers, without embeddings."""
    towers = _towers(Path(folder), size, Setting("ours", 2, base=base))
    frozen = {id(p): p for name, p in towers.named_parameters() if "base_layer" in name}
    return sum(parameter.nbytes for parameter in frozen.values()) / 1e6


def _towers(folder: Path, size: Size, setting: Setting) -> DualEncoder:
    lora = None if setting.base is None else Lora(rank=16, base=setting.base)
    backbone = Pretrained(path=str(folder))
    tower = TowerConfig(backbone=backbone, lora=lora, max_length=size.longest, prompt="{title}[EMB]")
    return dual_encoder.build(tower, tower, dim=DIM, tokenizers={}, seed=0)


def _ours(folder: Path, size: Size, setting: Setting) -> Callable[[int], float]:
    towers = _towers(folder, size, setting)
    for made in (towers.query, towers.document):
        made.get_submodule("projection").load_state_dict(load_file(folder / "projection.st"))
    cache = GradCache(query_rows=setting.chunks[0], document_rows=setting.chunks[1])
    schedule = Schedule(
        optimizer=Optimizer(peak_lr=RATE, weight_decay=DECAY),
        global_batch=setting.batch,
        precision="float32",
        memory=Memory(grad_cache=None if setting.plain else cache),
        resources=Ranks(workers=1),
    )
    dims = (DIM,) if setting.plain else DIMS
    losses = Losses(temperature=TEMPERATURE, matryoshka=dims, alpha=0.0, bidirectional=not setting.plain)
    loop = strategies.build(StageOne(towers, losses), schedule=schedule, device=torch.device("cpu"))
    towers.train()
    causal, pad = bool(towers.query.causal), towers.query.pad

    def step(number: int) -> float:
        queries, positives, negatives = rows(size, setting, number, causal=causal)
        ids = torch.arange(2 * setting.batch)
        triplets = Triplets(
            queries=collate(queries, pad=pad, packed=True),
            documents=collate([*positives, *negatives], pad=pad, packed=True),
            query_ids=ids[: setting.batch],
            document_ids=ids,
            known_positives=ids[: setting.batch, None],
            weights=torch.ones(setting.batch),
        )
        if setting.plain:
            loss, _ = loop(triplets)
            loop.backward(loss)
        else:
            loss, _ = cached_backward(loop, triplets, config=cache)
        loop.step(RATE)
        return float(loss.detach())

    return step


def _theirs(folder: Path, size: Size, setting: Setting) -> Callable[[int], float]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MatryoshkaLoss,
    )
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Router, Transformer

    def tower() -> list[Any]:
        causal = _causal(folder)
        headless = {} if causal else {"add_pooling_layer": False}  # otherwise it runs an unused pooler
        transformer = Transformer(str(folder), model_kwargs=headless)
        weight = load_file(folder / "projection.st")["weight"]
        dense = Dense(size.hidden, DIM, bias=False, activation_function=None, init_weight=weight)
        return [transformer, Pooling(size.hidden, "lasttoken" if causal else "cls"), dense]

    model = SentenceTransformer(modules=[Router.for_query_document(tower(), tower())], device="cpu")
    loss_of = MatryoshkaLoss(
        model,
        CachedMultipleNegativesRankingLoss(
            model,
            scale=1 / TEMPERATURE,
            mini_batch_size=setting.chunks[1],
            mini_batch_num_tokens=setting.budget,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
        ),
        list(DIMS),
    )
    causal, parameters = _causal(folder), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    model.train()

    def step(number: int) -> float:
        columns = rows(size, setting, number, causal=causal)
        features = []
        for column, task in zip(columns, ("query", "document", "document"), strict=True):
            batch = collate(column, pad=0)
            features.append({"input_ids": batch.ids, "attention_mask": batch.mask, "task": task})
        loss = loss_of(features, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _causal(folder: Path) -> bool:
    return bool(AutoConfig.from_pretrained(folder).model_type == "qwen2")
