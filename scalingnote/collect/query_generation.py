"""Queries near the observed ones: x' = decode(encode(x) + noise), EmbedDistill, section 4.3 and appendix E.

Any encoder-decoder checkpoint will do; one that was trained to restore its own masked input (BART) gives
queries, one that was trained on something else gives whatever that is.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float32
from numpy import ndarray
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from scalingnote.collect.config import QueryGenerationConfig
from scalingnote.collect.decontaminate import normalise
from scalingnote.errors import ConfigError

GENERATED = pa.schema(
    {
        "query_id": pa.string(),  # of the source, ~ and the number of sigma
        "query": pa.string(),
        "source_query_id": pa.string(),
        "sigma": pa.float64(),
    }
)


class QueryGenerator:
    """A model loaded once, called with batch after batch of queries."""

    def __init__(self, config: QueryGenerationConfig, *, device: str | None = None) -> None:
        """On a GPU where there is one, unless `device` is given. ConfigError when it cannot generate."""
        self._config = config
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model, self._tokenizer = _load(config.path, getattr(torch, config.precision))
        self._model.eval().to(self._device)
        self._masks = _mask_tokens(self._tokenizer) if config.mask_fraction else []
        positions = getattr(self._model.config, "max_position_embeddings", None) or config.max_length
        self._limit = min(config.max_length, positions, self._tokenizer.model_max_length)

    def __call__(self, queries: pa.Table) -> tuple[pa.Table, dict[str, int]]:
        """New queries (GENERATED), in the order of their sources and sigmas, and counts.

        Of `generated` texts, `dropped_empty` have no word and `dropped_same` are, after normalisation, their
        source or an earlier one of the same source. Noise and masks belong to (query_id, sigma) alone, and
        nothing is padded, so company changes a text only where two tokens tie to the last digits.
        """
        drafts = list(self._drafts(queries))
        texts: list[str] = [""] * len(drafts)
        for rows in self._batches(drafts):
            for row, text in zip(rows, self._generate([drafts[row] for row in rows]), strict=True):
                texts[row] = text
        return _keep(queries, drafts, texts)

    def _drafts(self, queries: pa.Table) -> "Iterator[_Draft]":
        for source, (query_id, query) in enumerate(
            zip(queries["query_id"].to_pylist(), queries["query"].to_pylist(), strict=True)
        ):
            encoded = self._tokenizer(
                query or "", truncation=True, max_length=self._limit, return_special_tokens_mask=True
            )
            words = np.array(encoded["special_tokens_mask"]) == 0
            for number, sigma in enumerate(self._config.sigmas):
                ids = list(encoded["input_ids"])
                drawn = self._random("mask", query_id, sigma).random(len(ids)) < self._config.mask_fraction
                for used, place in enumerate(np.flatnonzero(drawn & words)):
                    ids[place] = self._masks[min(used, len(self._masks) - 1)]
                yield _Draft(source, number, query_id, sigma, ids)

    def _random(self, purpose: str, query_id: str, sigma: float) -> np.random.Generator:
        key = "\x1f".join([str(self._config.seed), purpose, query_id, repr(sigma)])
        return np.random.default_rng(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest()))

    def _batches(self, drafts: "list[_Draft]") -> Iterator[list[int]]:
        """Rows of equal length, so that nothing is padded; in an order that arrival does not change."""
        order = [row for row, draft in enumerate(drafts) if draft.ids]
        order.sort(key=lambda row: (len(drafts[row].ids), drafts[row].query_id, drafts[row].number))
        for _, same in groupby(order, key=lambda row: len(drafts[row].ids)):
            rows = list(same)
            for start in range(0, len(rows), self._config.batch_size):
                yield rows[start : start + self._config.batch_size]

    @torch.inference_mode()
    def _generate(self, drafts: "list[_Draft]") -> list[str]:
        ids = torch.tensor([draft.ids for draft in drafts], device=self._device)
        mask = torch.ones_like(ids)
        encoded = self._model.get_encoder()(input_ids=ids, attention_mask=mask)
        hidden = encoded.last_hidden_state
        noise = np.stack([self._noise(draft, hidden.shape[-1]) for draft in drafts])
        encoded.last_hidden_state = hidden + torch.from_numpy(noise).to(hidden)
        output = self._model.generate(
            encoder_outputs=encoded,
            attention_mask=mask,
            do_sample=False,
            num_beams=self._config.num_beams,
            max_new_tokens=self._limit - 1,
        )
        texts = self._tokenizer.batch_decode(output, skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]

    def _noise(self, draft: "_Draft", dim: int) -> Float32[ndarray, "tokens dim"]:
        normal = self._random("noise", draft.query_id, draft.sigma).standard_normal(
            (len(draft.ids), dim), dtype=np.float32
        )
        return draft.sigma * normal


class _Draft(NamedTuple):
    """One text to generate."""

    source: int  # row of the query
    number: int  # of the sigma
    query_id: str
    sigma: float
    ids: list[int]  # tokens, some of them masked


def _keep(queries: pa.Table, drafts: list[_Draft], texts: list[str]) -> tuple[pa.Table, dict[str, int]]:
    seen = [{source} for source in normalise(queries["query"]).to_pylist()]
    normal = normalise(pa.array(texts, pa.string())).to_pylist()
    counts = Counter(generated=len(drafts), dropped_same=0, dropped_empty=0)
    rows = []
    for number, draft in enumerate(drafts):
        if not normal[number]:
            counts["dropped_empty"] += 1
        elif normal[number] in seen[draft.source]:
            counts["dropped_same"] += 1
        else:
            seen[draft.source].add(normal[number])
            rows.append((f"{draft.query_id}~{draft.number}", texts[number], draft.query_id, draft.sigma))
    columns = zip(*rows, strict=True) if rows else [[]] * len(GENERATED)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, GENERATED, strict=True)]
    return pa.table(arrays, schema=GENERATED), dict(counts)


def _load(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    disable_progress_bar()
    try:
        model, loaded = AutoModelForSeq2SeqLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]  # the rest lists every architecture there is
        raise ConfigError(f"cannot load an encoder-decoder model from {path!r}: {reason}") from None
    if loaded["missing_keys"]:
        raise ConfigError(
            f"{path!r} lacks weights of an encoder-decoder model ({sorted(loaded['missing_keys'])[0]}, ...): "
            "name a checkpoint for text generation, such as facebook/bart-base"
        )
    model.generation_config.max_length = None  # ours is given with each call
    return model, tokenizer


def _mask_tokens(tokenizer: Any) -> list[int]:
    """The mask token, or T5's sentinels: the first masked token takes the first, and so on."""
    if tokenizer.mask_token_id is not None:
        return [tokenizer.mask_token_id]
    vocabulary = tokenizer.get_vocab()
    sentinels = [vocabulary[name] for name in (f"<extra_id_{i}>" for i in range(100)) if name in vocabulary]
    if not sentinels:
        raise ConfigError(
            "the tokenizer has neither a mask token nor <extra_id_0>: set query_generation.mask_fraction=0"
        )
    return sentinels
