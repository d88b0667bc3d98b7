"""Comparison of the forms of a query tower, from string to unit vector.

    python -m benchmarks.query_encoder --json docs/results/query_encoder.json [--rounds N] [--compiled]

The forms are one student (BERT's shape, 4 layers of 768, random weights, a vocabulary of 30,000 trained on
the data) in every form of `QueryEncoder` and through sentence-transformers' `encode`; a lookup table of the
same tokens; and only the tokenizer, as a lower bound. For each number of threads one process runs all forms
in turns, so that other work on the machine affects all; the results are medians.

With one thread, rates use processor time. Cosines are to torch in float32, for the table to float64 sums.
Queries are real ones.
"""

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import public_sets
from benchmarks.report import arguments, run_isolated, show, write

Row = dict[str, Any]
Encode = Callable[[Sequence[str]], Any]
BATCHES = (1, 8, 64, 500)
REFERENCE = "torch fp32"
TABLE = "lookup"
TOKENIZER = "tokenizer only"
DIM = 128
QUICK = (TABLE, TOKENIZER)  # a single call of these is too short to time
COMPARED = 256  # queries whose embeddings are compared
PACKAGES = ("numpy", "torch")  # their documentation replaces medquad if that is missing


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the student, default: %(default)s")
    parser.add_argument("--hidden", type=int, default=768, help="of the student, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="of batch 1; larger batches get fewer")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile too: a minute more per thread count"
    )
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        queries = run_isolated(build, Path(folder), options)
        rows = [
            row for threads in options.threads for row in _in_a_process(folder, queries, threads, options)
        ]
    for threads in options.threads:
        show(
            f"{threads} threads" if threads > 1 else "1 thread", [r for r in rows if r["threads"] == threads]
        )
    tokens = statistics.mean(row.pop("tokens") for row in rows)
    write(options.json, metrics=metrics(rows) | {"tokens_per_query": tokens}, measurements=rows)


def build(folder: Path, options: Namespace) -> list[str]:
    """Write the student, its graphs and the table below `folder`; return the queries to encode."""
    import torch
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
    dual_encoder.build_tower(config, role="query", dim=DIM, tokenizer_json=learnt, seed=0).save(
        folder / "torch"
    )
    for form in onnx.ONNX_FILES:
        onnx_export.export_graph(folder / "torch", folder / form, queries=queries[:COMPARED], form=form)
    tokenizer = Tokenizer.from_str(learnt)
    rows = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), DIM)).astype(np.float32)
    lookup.LookupTower(torch.from_numpy(rows), tokenizer, max_length=32).save(folder / "lookup")
    return queries


def measure(folder: str, queries: Sequence[str], threads: int, options: Namespace) -> list[Row]:
    """Measure each batch size and form; call it in a new process, in which no library has set threads yet."""
    import torch

    torch.set_num_threads(threads)
    forms = _forms(Path(folder), threads, compiled=options.compiled)
    sample = list(queries[:COMPARED])
    embeddings = {name: encode(sample) for name, encode in forms.items() if name != TOKENIZER}
    lengths = [len(ids) for ids in forms[TOKENIZER](sample)]
    truth = dict.fromkeys(embeddings, embeddings[REFERENCE]) | {TABLE: _sums(Path(folder) / "lookup", sample)}
    cosines = {name: _least_cosine(vectors, truth[name]) for name, vectors in embeddings.items()}
    rows: list[Row] = []
    for batch in options.batches:
        rounds = max(options.rounds if batch == 1 else options.rounds * 2 // (2 + batch.bit_length()), 3)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
        for number in range(rounds + 1):
            for name, encode in forms.items():
                calls = max(512 // batch, 4) if name in QUICK else 1
                times[name].append(_timed(encode, queries, batch, number, calls))
                time.sleep(0.002)  # idle threads stop spinning
        rows += _rows(times, batch, threads, cosines)
    return [row | {"tokens": statistics.mean(lengths)} for row in rows]


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Return ratios of one thread's rates, and cosines."""
    rates = {(r["threads"], r["batch"], r["form"]): r["queries/cpu s"] for r in rows}
    pairs = {
        "onnx_int8_b1_over_torch_fp32": (1, "onnx int8", REFERENCE),
        "lookup_b1_over_torch_fp32": (1, TABLE, REFERENCE),
        "lookup_b64_over_tokenize": (64, TABLE, TOKENIZER),
        "onnx_int8_b1_over_sentence_transformers": (1, "onnx int8", "sentence-transformers"),
    }
    values: dict[str, float] = {}
    for name, (batch, one, other) in pairs.items():
        if (1, batch, one) in rates:
            values[name] = rates[1, batch, one] / rates[1, batch, other]
    for row in rows:
        if row["batch"] == 1 and row["threads"] == 1 and row["cosine"] is not None:
            values[f"cosine_{row['form'].replace(' ', '_').replace('-', '_')}"] = row["cosine"]
    return values


def _in_a_process(folder: str, queries: Sequence[str], threads: int, options: Namespace) -> list[Row]:
    # Libraries read these when they are loaded.
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        RAYON_NUM_THREADS=str(threads),
        TOKENIZERS_PARALLELISM=str(threads > 1).lower(),
    )
    return run_isolated(measure, folder, queries, threads, options)


def _forms(folder: Path, threads: int, *, compiled: bool) -> dict[str, Encode]:
    """Return form -> its encoder."""
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

    from scalingnote.encode.query_encoder import QueryEncoder
    from scalingnote.storage import arrow

    def ours(form: Any, place: str, **knobs: Any) -> Encode:
        encoder = QueryEncoder(folder / place, form, threads=threads, **knobs)
        return lambda queries: arrow.l2_normalize(encoder.encode_queries(queries))

    library = SentenceTransformer(str(folder / "torch"), device="cpu")
    tokenizer = Tokenizer.from_file(str(folder / "lookup" / "tokenizer.json"))

    def theirs(queries: Sequence[str]) -> Any:
        return library.encode(
            list(queries), batch_size=len(queries), normalize_embeddings=True, show_progress_bar=False
        )

    def tokenize(queries: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch_fast(queries, add_special_tokens=False)]

    more = {"torch bf16 compiled": ours("compiled", "torch", precision="bfloat16")} if compiled else {}
    return {
        REFERENCE: ours("torch", "torch", precision="float32"),
        "torch bf16": ours("torch", "torch", precision="bfloat16"),
        **more,
        "onnx fp32": ours("onnx", "onnx"),
        "onnx int8": ours("onnx_int8", "onnx_int8"),
        "sentence-transformers": theirs,
        TABLE: ours("lookup", "lookup"),
        TOKENIZER: tokenize,
    }


def _timed(
    encode: Encode, queries: Sequence[str], batch: int, number: int, calls: int
) -> tuple[float, float]:
    """Measure seconds per query of the processor and of the clock, with other queries in every round."""
    start = number * batch * calls
    chosen_batches = [
        [queries[(start + call * batch + i) % len(queries)] for i in range(batch)] for call in range(calls)
    ]
    cpu, clock = time.process_time(), time.perf_counter()
    for chosen in chosen_batches:
        encode(chosen)
    return (time.process_time() - cpu) / batch / calls, (time.perf_counter() - clock) / batch / calls


def _rows(
    times: dict[str, list[tuple[float, float]]], batch: int, threads: int, cosines: dict[str, float]
) -> list[Row]:
    middle = {  # the first round warms up
        name: [statistics.median(column) for column in zip(*times_of[1:], strict=True)]
        for name, times_of in times.items()
    }
    which = 0 if threads == 1 else 1
    return [
        {
            "threads": threads,
            "batch": batch,
            "form": name,
            "queries/cpu s": 1 / max(cpu, 1e-9),
            "queries/s": 1 / clock,
            f"over {REFERENCE}": middle[REFERENCE][which] / (cpu, clock)[which],
            "cosine": cosines.get(name),
        }
        for name, (cpu, clock) in middle.items()
    ]


def _sums(folder: Path, queries: Sequence[str]) -> Any:
    """Compute means of table rows in float64, token by token."""
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
    """Return texts to train a tokenizer, and queries: of medquad if available, else of Python packages."""
    from scalingnote.datasets import python_docs
    from scalingnote.datasets.config import PythonDocs
    from scalingnote.datasets.input_files import readable_rows

    if public_sets.find_files("medquad"):
        texts = public_sets.read_column("medquad", "documents", "content")
        queries = public_sets.read_column("medquad", "queries", "query")
    else:
        source = python_docs.read(PythonDocs(packages=PACKAGES))
        texts = [row["content"] for row in readable_rows(source.rows("documents"))]
        queries = [row["query"] for row in readable_rows(source.rows("queries"))]
    order = np.random.default_rng(0).permutation(len(queries))[:4000]
    sample = [queries[i] for i in order]
    return [*texts, *sample], sample


if __name__ == "__main__":
    main()
