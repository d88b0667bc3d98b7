"""Transformers of the collect stage: a cross-encoder scores pairs, an encoder-decoder generates queries.

Import this module late: it loads torch and transformers.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float32
from numpy import ndarray
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from scalingnote.core.errors import ConfigError
from scalingnote.triplets.collect.decontamination import normalise
from scalingnote.triplets.config import CrossEncoderConfig, QueryGenerationConfig

MAX_QUERY_TOKENS = 64  # of a query that is read, and of a generated one
GENERATED_BATCH_QUERIES = 64  # per forward pass
GENERATED = pa.schema(
    {
        "query_id": pa.string(),  # SOURCE~N, N is the index of sigma
        "query": pa.string(),
        "source_query_id": pa.string(),
        "sigma": pa.float64(),
    }
)


class PairScorer:
    """A cross-encoder of sentence-transformers, which reads a query and a document together."""

    def __init__(self, config: CrossEncoderConfig, *, device: str | None = None) -> None:
        """Load the model.

        Args:
            config: path, precision and bounds.
            device: by default a GPU if there is one.

        Raises:
            ConfigError: the model cannot be loaded, or has no trained score of one label.
        """
        self._config = config
        self._model = _load_cross_encoder(config, device or _default_device())

    def score(self, queries: Sequence[str], documents: Sequence[str]) -> Float32[ndarray, " pairs"]:
        """Score the relevance of ``documents[i]`` to ``queries[i]``; long pairs are cut to `max_length`.

        The longer text of a pair is cut. Equal pairs have equal scores in any order. In another batch, with
        other padding, the last digits of a score may differ.
        """
        pairs = sorted(set(zip(queries, documents, strict=True)), key=lambda pair: (len("".join(pair)), pair))
        if not pairs:
            return np.empty(0, np.float32)
        # predict() sorts by length, ties in the order of its input: the sort above makes this order unique.
        scores = self._model.predict(
            pairs,
            batch_size=self._config.batch_size,
            activation_fn=torch.nn.Identity() if self._config.activation == "none" else torch.nn.Sigmoid(),
            show_progress_bar=False,
        )
        score_of = dict(zip(pairs, scores, strict=True))
        return np.array([score_of[pair] for pair in zip(queries, documents, strict=True)], np.float32)


def _load_cross_encoder(config: CrossEncoderConfig, device: str) -> Any:
    try:
        import sentence_transformers  # optional, and takes seconds
    except ImportError:
        raise ConfigError(
            f"cross-encoder {config.path!r} needs sentence-transformers: pip install sentence-transformers"
        ) from None
    disable_progress_bar()
    try:
        model = sentence_transformers.CrossEncoder(
            config.path,
            device=device,
            trust_remote_code=False,
            model_kwargs={"dtype": getattr(torch, config.precision), "use_safetensors": True},
        )
    except (OSError, ValueError) as error:
        raise _not_loaded("a cross-encoder", config.path, error) from None
    # An encoder without a head is loaded, too: sentence-transformers adds a head with random weights.
    head = str((model.config.architectures or ["a model of unknown architecture"])[0])
    if len(model) == 1 and not head.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{config.path!r} is {head}, which has no trained score: name a model of class "
            "...ForSequenceClassification, such as cross-encoder/ms-marco-MiniLM-L6-v2"
        )
    if model.num_labels != 1:
        raise ConfigError(
            f"{config.path!r} has {model.num_labels} labels, and it is unknown which of them means relevant: "
            "name a cross-encoder with one label"
        )
    # A model with a lower limit keeps it.
    model.max_seq_length = min(config.max_length, model.max_seq_length or config.max_length)
    return model


class QueryGenerator:
    """Generator of queries near observed ones: x' = decode(encode(x) + noise).

    Source: EmbedDistill, section 4.3 and appendix E. Any encoder-decoder checkpoint can be used. One that was
    trained to restore masked input (BART) generates queries; the output of others depends on their task.
    """

    def __init__(self, config: QueryGenerationConfig, *, device: str | None = None) -> None:
        """Load the model; raise ConfigError if it cannot be loaded, or lacks weights or a mask token."""
        self._config = config
        self._device = device or _default_device()
        self._model, self._tokenizer = _load_encoder_decoder(config.path)
        self._model.eval().to(self._device)
        self._masks = _mask_tokens(self._tokenizer) if config.mask_fraction else []
        positions = getattr(self._model.config, "max_position_embeddings", None) or MAX_QUERY_TOKENS
        self._limit = min(MAX_QUERY_TOKENS, positions, self._tokenizer.model_max_length)

    def __call__(self, queries: pa.Table) -> tuple[pa.Table, dict[str, int]]:
        """Generate GENERATED rows from query_id and query, in the order of sources and sigmas; and counts.

        Noise and masks depend only on (query_id, sigma) and the seed, and nothing is padded, so the other
        queries of a batch change a text only if two tokens have equal scores up to the last digits.

        `generated` counts all texts, `dropped_empty` those without a word, and `dropped_same` those that
        equal, after normalisation, their source or an earlier text of the same source.
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
            encoding = self._tokenizer(
                query or "", truncation=True, max_length=self._limit, return_special_tokens_mask=True
            )
            words = np.array(encoding["special_tokens_mask"]) == 0
            for number, sigma in enumerate(self._config.sigmas):
                ids = list(encoding["input_ids"])
                is_masked = (
                    self._random("mask", query_id, sigma).random(len(ids)) < self._config.mask_fraction
                )
                for count, position in enumerate(np.flatnonzero(is_masked & words)):
                    ids[position] = self._masks[min(count, len(self._masks) - 1)]
                yield _Draft(source, number, query_id, sigma, ids)

    def _random(self, purpose: str, query_id: str, sigma: float) -> np.random.Generator:
        key = "\x1f".join([str(self._config.seed), purpose, query_id, repr(sigma)])
        return np.random.default_rng(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest()))

    def _batches(self, drafts: "list[_Draft]") -> Iterator[list[int]]:
        """Yield rows of equal length, so that nothing is padded, independent of the order of the drafts."""
        order = [row for row, draft in enumerate(drafts) if draft.ids]
        order.sort(key=lambda row: (len(drafts[row].ids), drafts[row].query_id, drafts[row].number))
        for _, same in groupby(order, key=lambda row: len(drafts[row].ids)):
            rows = list(same)
            for start in range(0, len(rows), GENERATED_BATCH_QUERIES):
                yield rows[start : start + GENERATED_BATCH_QUERIES]

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
            num_beams=1,
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
            source = {"source_query_id": draft.query_id, "sigma": draft.sigma}
            rows.append(source | {"query_id": f"{draft.query_id}~{draft.number}", "query": texts[number]})
    return pa.Table.from_pylist(rows, schema=GENERATED), dict(counts)


def _load_encoder_decoder(path: str) -> tuple[Any, Any]:
    disable_progress_bar()
    try:
        model, info = AutoModelForSeq2SeqLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise _not_loaded("an encoder-decoder model", path, error) from None
    if info["missing_keys"]:
        raise ConfigError(
            f"{path!r} lacks weights of an encoder-decoder model ({sorted(info['missing_keys'])[0]}, ...): "
            "name a checkpoint for text generation, such as facebook/bart-base"
        )
    model.generation_config.max_length = None  # each call passes max_new_tokens, and both would conflict
    return model, tokenizer


def _mask_tokens(tokenizer: Any) -> list[int]:
    """Return the mask token, or T5's sentinels: one for each masked token, in order."""
    if tokenizer.mask_token_id is not None:
        return [tokenizer.mask_token_id]
    vocabulary = tokenizer.get_vocab()
    sentinels = [vocabulary[name] for name in (f"<extra_id_{i}>" for i in range(100)) if name in vocabulary]
    if not sentinels:
        raise ConfigError(
            "the tokenizer has neither a mask token nor <extra_id_0>: set query_generation.mask_fraction=0"
        )
    return sentinels


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _not_loaded(kind: str, path: str, error: Exception) -> ConfigError:
    reason = str(error).partition("\n")[0]  # further lines list all known architectures
    return ConfigError(f"cannot load {kind} from {path!r}: {reason}")
