"""Published embedding models against sentence-transformers: equal embeddings, and documents per second.

    python -m benchmarks.native --json docs/results/native.json [--documents N] [--rounds N]

- max_difference: the largest difference of any number of an embedding, after the model's own normalisation,
  over queries and documents of all-MiniLM-L6-v2 and of small models with random weights (BERT's and Qwen2's
  shape: mean, cls and last-token pooling, dense layers, prompts, an end token from the post-processor)
- speed: all-MiniLM-L6-v2 on documents of mixed lengths, texts in and vectors out, in float32 and one process;
  both sides take turns, sentence-transformers at its best batch size

With one thread rates are of processor time, which other work on the machine does not stretch.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from benchmarks import minilm
from benchmarks.report import alone, arguments, show, write

Row = dict[str, Any]
PROMPTS = {"query": "query: ", "document": "passage: "}
HIDDEN, VOCABULARY, MAX_LENGTH = 64, 2000, 48
BATCHES = (8, 16, 32, 64)  # rows; sentence-transformers takes 32 unless it is told
TRIED = 256  # documents that find the best batch size
LONGEST = 400  # words of a document
MINILM = "all-MiniLM-L6-v2"
# Pooling, family, and what else: see `small`.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "BERT, mean": {"pooling": "mean"},
    "BERT, cls, prompts": {"pooling": "cls", "prompts": PROMPTS},
    "BERT, mean, two dense layers": {"pooling": "mean", "dense": (48, 32)},
    "BERT, mean without its prompt": {"pooling": "mean", "prompts": PROMPTS, "include_prompt": False},
    "Qwen2, last token, prompts": {"pooling": "lasttoken", "causal": True, "prompts": PROMPTS},
    "Qwen2 that reads both ways, mean": {"pooling": "mean", "causal": True, "both_ways": True},
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=768, help="default: %(default)s")
    parser.add_argument("--words", type=float, default=60, help="of a document, median; default: %(default)s")
    parser.add_argument("--spread", type=float, default=0.8, help="of the logarithm of words; %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="of both sides, default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of both sides, default: %(default)s")
    options = parser.parse_args()
    path = str(minilm.path())
    documents = texts(Path(path), options.documents, words=options.words, spread=options.spread)
    differences = alone(compare, path, documents[:48])
    show("Largest difference from sentence-transformers", differences)
    speeds, ratio = alone(speed, path, documents, rounds=options.rounds, threads=options.threads)
    show(f"{MINILM}: {options.documents:,} documents, {options.threads} threads", speeds)
    metrics = {
        "max_difference": max(max(row["queries"], row["documents"]) for row in differences),
        "speed_over_sentence_transformers": round(ratio, 3),
    }
    print(f"\n{metrics}")
    write(options.json, metrics=metrics, differences=differences, speeds=speeds)


def texts(model: Path, count: int, *, words: float, spread: float) -> list[str]:
    """Documents of words of the model's vocabulary, their lengths drawn from a lognormal distribution."""
    rng = np.random.default_rng(0)
    vocabulary = (model / "vocab.txt").read_text(encoding="utf-8").split("\n")
    known = [word for word in vocabulary[2000:] if word.isalpha()]
    lengths = np.clip(rng.lognormal(np.log(words), spread, count), 1, LONGEST).astype(int)
    return [" ".join(rng.choice(known, length)) for length in lengths]


def compare(path: str, documents: Sequence[str]) -> list[Row]:
    """The largest differences of queries and of documents, model by model."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: small(Path(folder) / str(i), **kind) for i, (name, kind) in enumerate(MODELS.items())}
        for name, place in {**paths, MINILM: path}.items():
            odd = ["", "a", *documents[:2], "One, two; [MASK] and three!"]
            rows.append({"model": name} | difference(place, [*odd, *documents]))
    return rows


def difference(path: str, given: Sequence[str]) -> dict[str, float]:
    """The largest differences of one model's embeddings."""
    theirs, ours = _theirs(path), _ours(path)
    found = {}
    for name, role in (("queries", "query"), ("documents", "document")):
        expected = getattr(theirs, f"encode_{role}")(list(given))
        found[name] = float(np.abs(ours[role](given) - expected).max())
    return found


def speed(path: str, documents: Sequence[str], *, rounds: int, threads: int) -> tuple[list[Row], float]:
    """Documents a second of both sides, and the median of the rounds' ratios."""
    import torch

    torch.set_num_threads(threads)
    theirs, ours = _theirs(path), _ours(path)["document"]
    clock = time.process_time if threads == 1 else time.perf_counter

    def seconds(encode: Callable[[Sequence[str]], Any], given: Sequence[str]) -> float:
        start = clock()
        encode(given)
        return clock() - start

    def peer(batch: int) -> Callable[[Sequence[str]], Any]:
        return lambda given: theirs.encode_document(list(given), batch_size=batch)

    ours(documents[:8]), peer(8)(documents[:8])
    batch = min(BATCHES, key=lambda size: seconds(peer(size), documents[:TRIED]))
    sides = {"scalingnote": ours, f"sentence-transformers, batch {batch}": peer(batch)}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            taken[name].append(seconds(sides[name], documents))
    own, other = taken.values()
    rows = [
        {
            "side": name,
            "documents/s": len(documents) / statistics.median(found),
            "slowest round": len(documents) / max(found),
            "fastest round": len(documents) / min(found),
        }
        for name, found in taken.items()
    ]
    return rows, statistics.median(peer / mine for mine, peer in zip(own, other, strict=True))


def _ours(path: str) -> dict[str, Callable[[Sequence[str]], ndarray]]:
    """Encoders of queries and of documents, as the stage adopt makes their towers."""
    import pyarrow as pa

    from scalingnote.adopt import job
    from scalingnote.adopt.config import AdoptConfig
    from scalingnote.encode.encoder import Encoder

    config = AdoptConfig(path=path)
    both = (job.open_tower(config, role) for role in job.ROLES)
    query, document = (Encoder(tower, precision="float32") for tower in both)

    def of_documents(given: Sequence[str]) -> ndarray:
        blank = [""] * len(given)
        table = pa.table({"title": blank, "topic": blank, "content": list(given)})
        return document.encode_documents(table)["summary"]

    return {"query": query.encode_queries, "document": of_documents}


def _theirs(path: str) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return SentenceTransformer(path, device=device)


def small(
    folder: Path,
    *,
    pooling: str,
    causal: bool = False,
    both_ways: bool = False,
    dense: Sequence[int] = (),
    prompts: Mapping[str, str] | None = None,
    include_prompt: bool = True,
) -> str:
    """A model with random weights as sentence-transformers saves it, below `folder`; returns its folder.

    The token behind every text comes from the tokenizer's post-processor alone.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast, Qwen2Config

    from scalingnote.models.backbone import train_tokenizer

    raw = Tokenizer.from_str(train_tokenizer([__doc__ or ""] * 2, vocabulary=VOCABULARY))
    end = "[SEP]"
    raw.post_processor = TemplateProcessing(
        single=f"$A {end}" if causal else f"[CLS] $A {end}",
        special_tokens=[(token, raw.token_to_id(token)) for token in ("[CLS]", end)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", eos_token="[EOS]"
    )
    size: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2 * MAX_LENGTH,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    settings: Any = Qwen2Config(num_key_value_heads=2, **size) if causal else BertConfig(**size)
    if both_ways:
        settings.is_causal = False
    AutoModel.from_config(settings).save_pretrained(folder / "transformer")
    tokenizer.save_pretrained(folder / "transformer")
    first = Transformer(str(folder / "transformer"), max_seq_length=MAX_LENGTH)
    modules: list[Any] = [first, Pooling(HIDDEN, pooling, include_prompt=include_prompt)]
    widths = [HIDDEN, *dense]
    modules += [Dense(wide, out) for wide, out in zip(widths, dense, strict=False)]
    made = SentenceTransformer(modules=[*modules, Normalize()], device="cpu", prompts=dict(prompts or {}))
    made.save(str(folder / "model"), create_model_card=False)
    return str(folder / "model")


if __name__ == "__main__":
    main()
