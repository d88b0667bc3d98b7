"""all-MiniLM-L6-v2 against sentence-transformers: equal embeddings, and documents per second.

    python -m benchmarks.native --json docs/results/native.json [--documents N] [--rounds N]

- max_difference: the largest difference of any number of an embedding, after the model's own normalisation,
  over queries and documents (tests/models/test_published_tower.py compares other kinds of models)
- speed: documents of mixed lengths, texts in and vectors out, in float32 and one process; both sides take
  turns, sentence-transformers at its best batch size; rates are of processor time, of one thread
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from benchmarks import minilm
from benchmarks.report import arguments, run_isolated, show, take_turns, write

Row = dict[str, Any]
BATCHES = (8, 16, 32, 64)  # rows; sentence-transformers' default is 32
TUNING_DOCUMENTS = 256  # to choose the best batch size
WORDS, SPREAD, LONGEST = 60, 0.8, 400  # of a document: median, deviation of the logarithm, most
MINILM = "all-MiniLM-L6-v2"


def main() -> None:
    options = arguments(__doc__, documents=768, rounds=5).parse_args()
    path = str(minilm.path())
    documents = texts(Path(path), options.documents)
    odd = ["", "a", "One, two; [MASK] and three!"]
    differences = run_isolated(difference, path, [*odd, *documents[:48]])
    show("Largest difference from sentence-transformers", [differences])
    speeds, ratio = run_isolated(speed, path, documents, rounds=options.rounds)
    show(f"{MINILM}: {options.documents:,} documents, one thread", speeds)
    metrics = {
        "max_difference": max(differences.values()),
        "speed_over_sentence_transformers": round(ratio, 3),
    }
    show("Metrics", [metrics])
    write(options.json, metrics=metrics, differences=[{"model": MINILM, **differences}], speeds=speeds)


def texts(model: Path, count: int) -> list[str]:
    """Draw documents of words of the model's vocabulary, with log-normal lengths."""
    rng = np.random.default_rng(0)
    vocabulary = (model / "vocab.txt").read_text(encoding="utf-8").split("\n")
    known = [word for word in vocabulary[2000:] if word.isalpha()]
    lengths = np.clip(rng.lognormal(np.log(WORDS), SPREAD, count), 1, LONGEST).astype(int)
    return [" ".join(rng.choice(known, length)) for length in lengths]


def difference(path: str, given: Sequence[str]) -> dict[str, float]:
    """Return the largest differences of the embeddings of queries and of documents."""
    theirs, ours = _theirs(path), _ours(path)
    differences = {}
    for name, role in (("queries", "query"), ("documents", "document")):
        expected = getattr(theirs, f"encode_{role}")(list(given))
        differences[name] = float(np.abs(ours[role](given) - expected).max())
    return differences


def speed(path: str, documents: Sequence[str], *, rounds: int) -> tuple[list[Row], float]:
    """Measure documents a second of both sides, and the median of the rounds' ratios."""
    import torch

    torch.set_num_threads(1)
    theirs, ours = _theirs(path), _ours(path)["document"]

    def peer(batch: int, given: Sequence[str]) -> None:
        theirs.encode_document(list(given), batch_size=batch)

    ours(documents[:8])
    peer(8, documents[:8])
    sample = documents[:TUNING_DOCUMENTS]
    tuning_times = take_turns({f"{size}": partial(peer, size, sample) for size in BATCHES}, rounds=1)
    batch = int(min(tuning_times, key=lambda size: tuning_times[size]))
    peers = f"sentence-transformers, batch {batch}"
    sides: dict[str, Callable[[], Any]] = {"scalingnote": partial(ours, documents)}
    sides[peers] = partial(peer, batch, documents)
    times = take_turns(sides, rounds=rounds)
    our_times, peer_times = times.values()
    rows = [
        {"side": name, "documents/s": len(documents) / statistics.median(seconds)}
        for name, seconds in times.items()
    ]
    return rows, statistics.median(peer / mine for mine, peer in zip(our_times, peer_times, strict=True))


def _ours(path: str) -> dict[str, Callable[[Sequence[str]], ndarray]]:
    """Return encoders of queries and of documents, with the towers of the stage adopt."""
    import pyarrow as pa

    from scalingnote.encode.encoder import Encoder
    from scalingnote.models import adopt
    from scalingnote.models.config import AdoptConfig

    config = AdoptConfig(path=path)
    both = (adopt.open_tower(config, role) for role in adopt.ROLES)
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


if __name__ == "__main__":
    main()
