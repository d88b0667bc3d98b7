"""Forms of a query tower against each other: string in, unit vector out.

    python -m benchmarks.query_encoder --json docs/results/query_encoder.json [--rounds N]

One student (BERT's shape, 4 layers of 768, random weights, a vocabulary of 30,000 learnt from the data) in
every form that `QueryEncoder` runs, and through sentence-transformers' `encode`; a lookup table of the same
tokens; and only the tokenizer, as a floor. One process of one thread holds all forms, which take turns, so
that other work on the machine affects all; medians count.

Rates are of processor time. Cosines are to torch in float32, of the table to float64 sums. Queries are
medquad's.
"""

import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import public_sets
from benchmarks.report import arguments, run_isolated, show, take_turns, write

Row = dict[str, Any]
Encode = Callable[[Sequence[str]], Any]
BATCHES = (1, 8, 64, 500)
REFERENCE = "torch fp32"
TABLE = "lookup"
TOKENIZER = "tokenizer only"
DIM = 128
QUICK = (TABLE, TOKENIZER)  # a single call of these is too short to time
COMPARED = 256  # queries whose embeddings are compared
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    parser = arguments(__doc__, layers=4, hidden=768, rounds=15)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options = parser.parse_args()
    os.environ.update(ONE_THREAD)  # read when a library is loaded
    with TemporaryDirectory() as folder:
        queries = run_isolated(build, Path(folder), options)
        rows, tokens = run_isolated(measure, Path(folder), queries, options)
    show("One thread", rows)
    write(options.json, metrics=metrics(rows) | {"tokens_per_query": tokens}, measurements=rows)


def build(folder: Path, options: Namespace) -> list[str]:
    """Write the student, its graphs and the table below `folder`; returns the queries to ask."""
    from tokenizers import Tokenizer

    from scalingnote.models import backbone, dual_encoder, lookup, onnx, onnx_export
    from scalingnote.models.config import Scratch, TowerConfig

    texts, queries = _data()
    learnt = backbone.train_tokenizer(texts, vocabulary=30_000)
    shape = Scratch(
        architecture="bert",
        layers=options.layers,
        hidden=options.hidden,
        heads=max(options.hidden // 64, 1),
        intermediate=4 * options.hidden,
        max_positions=64,
    )
    config = TowerConfig(backbone=shape, max_length=32)
    student = dual_encoder.build_tower(config, role="query", dim=DIM, tokenizer_json=learnt, seed=0)
    student.save(folder / "torch")
    for form in onnx.ONNX_FILES:
        onnx_export.export_graph(folder / "torch", folder / form, queries=queries[:COMPARED], form=form)
    tokenizer = Tokenizer.from_str(learnt)
    rows = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), DIM)).astype(np.float32)
    lookup.from_table(rows, tokenizer, max_length=32, storage="float16").save(folder / "lookup")
    return queries


def measure(folder: Path, queries: Sequence[str], options: Namespace) -> tuple[list[Row], float]:
    """A row per batch size and form, and the mean tokens of a query."""
    import torch

    torch.set_num_threads(1)
    forms = _forms(folder)
    compared = list(queries[:COMPARED])
    found = {name: encode(compared) for name, encode in forms.items() if name != TOKENIZER}
    lengths = [len(ids) for ids in forms[TOKENIZER](compared)]
    truth = dict.fromkeys(found, found[REFERENCE]) | {TABLE: _sums(folder / "lookup", compared)}
    cosines = {name: _least_cosine(made, truth[name]) for name, made in found.items()}
    rows: list[Row] = []
    for batch in options.batches:
        rounds = max(options.rounds if batch == 1 else options.rounds * 2 // (2 + batch.bit_length()), 3)
        count = len(queries)
        batches = [[queries[(at + i) % count] for i in range(batch)] for at in range(0, count, batch)]
        calls = {name: max(512 // batch, 4) if name in QUICK else 1 for name in forms}
        sides = {
            name: partial(_encode_next, encode, cycle(batches), calls[name]) for name, encode in forms.items()
        }
        seconds = take_turns(sides, rounds=rounds + 1)  # the first warms up
        cpu = {name: statistics.median(found[1:]) / batch / calls[name] for name, found in seconds.items()}
        rows += [
            {
                "threads": 1,
                "batch": batch,
                "form": name,
                "queries/cpu s": 1 / cpu[name],
                f"over {REFERENCE}": cpu[REFERENCE] / cpu[name],
                "cosine": cosines.get(name),
            }
            for name in forms
        ]
    return rows, statistics.mean(lengths)


def _encode_next(encode: Encode, batches: Iterator[list[str]], calls: int) -> None:
    """Encode other queries in every round: a table keeps the tokens of words that it has seen."""
    for chosen in islice(batches, calls):
        encode(chosen)


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Ratios of one thread's rates, and cosines."""
    rates = {(row["batch"], row["form"]): row["queries/cpu s"] for row in rows}
    pairs = {
        "onnx_int8_b1_over_torch_fp32": (1, "onnx int8", REFERENCE),
        "lookup_b1_over_torch_fp32": (1, TABLE, REFERENCE),
        "lookup_b64_over_tokenize": (64, TABLE, TOKENIZER),
        "onnx_int8_b1_over_sentence_transformers": (1, "onnx int8", "sentence-transformers"),
    }
    made: dict[str, float] = {
        name: rates[batch, one] / rates[batch, other]
        for name, (batch, one, other) in pairs.items()
        if (batch, one) in rates
    }
    for row in rows:
        if row["batch"] == 1 and row["cosine"] is not None:
            made[f"cosine_{row['form'].replace(' ', '_').replace('-', '_')}"] = row["cosine"]
    return made


def _forms(folder: Path) -> dict[str, Encode]:
    """Form -> what encodes with it."""
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

    from scalingnote.encode.query_encoder import QueryEncoder
    from scalingnote.storage import arrow

    def ours(form: Any, place: str, **knobs: Any) -> Encode:
        encoder = QueryEncoder(folder / place, form, threads=1, **knobs)
        return lambda queries: arrow.l2_normalize(encoder.encode_queries(queries))

    library = SentenceTransformer(str(folder / "torch"), device="cpu")
    tokenizer = Tokenizer.from_file(str(folder / "lookup" / "tokenizer.json"))

    def theirs(queries: Sequence[str]) -> Any:
        return library.encode(
            list(queries), batch_size=len(queries), normalize_embeddings=True, show_progress_bar=False
        )

    def tokenize(queries: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch_fast(queries, add_special_tokens=False)]

    return {
        REFERENCE: ours("torch", "torch", precision="float32"),
        "torch bf16": ours("torch", "torch", precision="bfloat16"),
        "onnx fp32": ours("onnx", "onnx"),
        "onnx int8": ours("onnx_int8", "onnx_int8"),
        "sentence-transformers": theirs,
        TABLE: ours("lookup", "lookup"),
        TOKENIZER: tokenize,
    }


def _sums(folder: Path, queries: Sequence[str]) -> Any:
    """Means of table rows in float64, token by token."""
    from tokenizers import Tokenizer

    from scalingnote.models.lookup_table import Table

    table = Table.read(folder)
    rows = table.rows().astype(np.float64)
    encoded = Tokenizer.from_str(table.tokenizer_json).encode_batch(list(queries), add_special_tokens=False)
    return np.stack([rows[found.ids[: table.max_length]].mean(axis=0) for found in encoded])


def _least_cosine(found: Any, truth: Any) -> float:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(truth, axis=1)
    return float(((found * truth).sum(axis=1) / lengths).min())


def _data() -> tuple[list[str], list[str]]:
    """Texts to learn a tokenizer from, and queries."""
    texts = public_sets.read_column("medquad", "documents", "content")
    queries = public_sets.read_column("medquad", "queries", "query")
    chosen = [queries[i] for i in np.random.default_rng(0).permutation(len(queries))[:4000]]
    return [*texts, *chosen], chosen


if __name__ == "__main__":
    main()
