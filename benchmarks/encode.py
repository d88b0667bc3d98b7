"""Encoding documents: the whole Ray job against the bare forward pass, and against sentence-transformers.

    python -m benchmarks.encode --json docs/results/encode.json

- floor: only the tower's forward pass, one thread, on token rows packed before the clock starts
- job: the stage as users run it, one worker of one thread: reading, hashing, tokenising, encoding, writing
  and committing; Ray's start and the loading of the model, which do not grow, are left out
- sentence-transformers: `encode` on the same weights and documents, one thread, its best batch size

Each over documents of mixed and of equal length, in tokens per second and per second of processor time; the
job also with two workers.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.report import arguments, run_isolated, show, write
from scalingnote.core.config import Config
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft, open_artifact

BUDGETS = (1024, 2048, 4096, 8192)
BATCHES = (8, 16, 32, 64)
Row = dict[str, Any]
SYLLABLES = np.array(["ba", "ko", "li", "me", "nu", "ra", "si", "ta", "ve", "zo", "che", "dri", "flo", "gu"])
PROMPT = "{title} [TITLE_QUERY] {topic}: {content} [CONTENT_QUERY] [EMB]"


class Made(Config):
    """The config of inputs made up here."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=6144, help="default: %(default)s")
    parser.add_argument("--words", type=float, default=60, help="of a document, median; default: %(default)s")
    parser.add_argument("--spread", type=float, default=0.8, help="of the logarithm of words; %(default)s")
    parser.add_argument("--hidden", type=int, default=256, help="width of the tower, default: %(default)s")
    parser.add_argument("--layers", type=int, default=2, help="of the tower, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of floor, job and peer; default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics, speeds = measure_speed(options, folder / "mixed", options.spread)
        equal, more = measure_speed(options, folder / "equal", 0.0)
        metrics |= {f"{name}_equal_lengths": value for name, value in equal.items()}
        speeds += more
    write(options.json, metrics=metrics, speeds=speeds)


def measure_speed(
    options: argparse.Namespace, folder: Path, spread: float
) -> tuple[dict[str, float], list[Row]]:
    """Tokens per second of all sides, in alternation: medians, and medians of the rounds' ratios."""
    folder.mkdir()
    dataset = make_documents(
        f"{folder}/dataset", options.documents, rows_per_part=512, words=options.words, spread=spread
    )
    towers = make_towers(f"{folder}/towers", dataset, layers=options.layers, hidden=options.hidden)
    budget = batch = 0  # the best of each side, found below
    sides: dict[str, Callable[[int], Row]] = {
        "floor": lambda _: run_isolated(floor, dataset.uri, towers.uri, budget),
        "job, 1 worker": lambda n: run_isolated(
            job_speed, dataset.uri, towers.uri, f"{folder}/one-{n}", 1, budget
        ),
        "sentence-transformers": lambda _: run_isolated(peer, dataset.uri, towers.uri, batch),
        "job, 2 workers": lambda n: run_isolated(
            job_speed, dataset.uri, towers.uri, f"{folder}/two-{n}", 2, budget
        ),
    }
    tried = {size: run_isolated(floor, dataset.uri, towers.uri, size, 1500) for size in BUDGETS}
    budget = max(tried, key=lambda size: tried[size]["tokens/s"])
    tried = {size: run_isolated(peer, dataset.uri, towers.uri, size, 1500) for size in BATCHES}
    batch = max(tried, key=lambda size: tried[size]["tokens/s"])
    found: dict[str, list[Row]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, side in sides.items():
            found[name].append(side(number))
    middle, by_cpu = (
        {name: float(np.median([row[unit] for row in rows])) for name, rows in found.items()}
        for unit in ("tokens/s", "tokens/CPU s")
    )
    rows = [
        {
            "side": name,
            "lengths": "mixed" if spread else "equal",
            "tokens/s": speed,
            "tokens/CPU s": by_cpu[name],
            "of the floor": speed / middle["floor"],
            "padding": found[name][0].get("padding", "-"),
            "of peak": found[name][0].get("of peak", "-"),
            "micro-batch": f"{batch} rows" if name == "sentence-transformers" else f"{budget} tokens",
        }
        for name, speed in middle.items()
    ]
    show(f"{options.documents:,} documents, {options.layers} layers of {options.hidden}", rows)

    def over(side: str, other: str, unit: str) -> float:
        """The median of the rounds' ratios: a machine that slows down between rounds changes neither side."""
        pairs = zip(found[side], found[other], strict=True)
        return round(float(np.median([mine[unit] / theirs[unit] for mine, theirs in pairs])), 3)

    job, peer_name = "job, 1 worker", "sentence-transformers"
    return {
        "tokens_per_s_over_floor": over(job, "floor", "tokens/s"),
        "tokens_per_s_over_sentence_transformers": over(job, peer_name, "tokens/s"),
        "tokens_per_cpu_s_over_floor": over(job, "floor", "tokens/CPU s"),
        "tokens_per_cpu_s_over_sentence_transformers": over(job, peer_name, "tokens/CPU s"),
        "two_workers_over_twice_one": round(over("job, 2 workers", job, "tokens/s") / 2, 3),
    }, rows


class Clock:
    """Time and processor time of this process since it was made."""

    def __init__(self) -> None:
        self._start, self._cpu = time.perf_counter(), time.process_time()

    def rates(self, tokens: int) -> Row:
        """Tokens per second of either."""
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        return {"tokens/s": tokens / seconds, "tokens/CPU s": tokens / cpu}


def floor(dataset: str, towers: str, budget: int, most: int | None = None) -> Row:
    """The forward pass over rows that were tokenised, sorted and packed beforehand."""
    import torch

    from scalingnote.encode.documents import load_document_prompt, tokenise
    from scalingnote.encode.encoder import by_tokens
    from scalingnote.encode.engines import load_document_encoder
    from scalingnote.models.batch import collate
    from scalingnote.models.prompt import from_columns

    torch.set_num_threads(1)
    made = open_artifact(towers, kind="dual_encoder")
    table = open_artifact(dataset, kind="dataset").table("documents").slice(0, most)
    rows = from_columns(tokenise(table, load_document_prompt(made))[0])
    tower = load_document_encoder(made, budget).tower
    lengths = [len(row.ids) for row in rows]
    batches = [
        collate([rows[i] for i in chosen], pad=tower.pad, packed=tower.packs)
        for chosen in by_tokens(lengths, budget=budget, packed=tower.packs)
    ]
    with torch.inference_mode():
        tower(batches[0])
        clock = Clock()
        for batch in batches:
            tower(batch)
    padded = sum(batch.ids.numel() for batch in batches)
    return clock.rates(sum(lengths)) | {"padding": 1 - sum(lengths) / padded}


def job_speed(dataset: str, towers: str, output: str, workers: int, budget: int) -> Row:
    """The stage, from the first document that is read to the last that is committed."""
    from scalingnote.core import cluster
    from scalingnote.encode import job
    from scalingnote.encode.config import EncodeConfig, Fleet

    cluster.connect()
    config = EncodeConfig(token_budget=budget, resources=Fleet(workers=workers))
    made = job.run(config, dataset=dataset, dual_encoder=towers, output=output).manifest.info["encoding"]
    return {
        "tokens/s": workers * made["tokens"] / made["worker_seconds"],
        "tokens/CPU s": made["tokens"] / made["worker_cpu_seconds"],
        "padding": made["padding"],
        "of peak": made["of_peak"],
    }


def peer(dataset: str, towers: str, batch: int, most: int | None = None) -> Row:
    """sentence-transformers on the folder that a tower is saved to, texts in and unit vectors out."""
    import torch
    from sentence_transformers import SentenceTransformer

    from scalingnote.encode.documents import load_document_prompt, tokenise
    from scalingnote.models.library_export import document_layout

    torch.set_num_threads(1)
    made = open_artifact(towers, kind="dual_encoder")
    table = open_artifact(dataset, kind="dataset").table("documents").slice(0, most)
    folder = made.directory("document")
    model = SentenceTransformer(str(folder), device="cpu")
    written = document_layout(made.read_json("document/tower.json")["prompt"], causal=True)
    texts = [written.format(**row) for row in table.select(["title", "topic", "content"]).to_pylist()]
    lengths = tokenise(table, load_document_prompt(made))[0]["ids"]
    model.encode(texts[:16], batch_size=batch, normalize_embeddings=True)
    clock = Clock()
    model.encode(texts, batch_size=batch, normalize_embeddings=True, show_progress_bar=False)
    return clock.rates(sum(map(len, lengths.to_pylist())))


def make_documents(uri: str, count: int, *, rows_per_part: int, words: float, spread: float) -> Artifact:
    """A dataset whose contents have `words` words at the median, log-normal with deviation `spread`."""
    rng = np.random.default_rng(0)
    vocabulary = np.array(["".join(word) for word in rng.choice(SYLLABLES, (4000, 3))])
    draft = Draft(uri, kind="dataset", config=Made(), parents={})
    for number, start in enumerate(range(0, count, rows_per_part)):
        size = min(rows_per_part, count - start)
        lengths = np.maximum(np.exp(rng.normal(np.log(words), spread, size)).astype(int), 1)
        drawn = vocabulary[(rng.pareto(1.0, lengths.sum()) * 20).astype(int) % len(vocabulary)].tolist()
        stops = np.cumsum(lengths).tolist()
        rows = [
            {
                "doc_id": f"d{start + i:09d}",
                "title": " ".join(drawn[stop - length : stop][:3]),
                "topic": f"topic {i % 8}",
                "content": " ".join(drawn[stop - length : stop]),
                "group": "",
            }
            for i, (length, stop) in enumerate(zip(lengths.tolist(), stops, strict=True))
        ]
        part = pa.Table.from_pylist(rows, schema=schema.DOCUMENTS)
        draft.write_table(f"documents/part-{number:05d}.parquet", part)
    return draft.commit(counts={"documents": count})


def make_towers(uri: str, dataset: Artifact, *, layers: int, hidden: int, max_length: int = 512) -> Artifact:
    """Return a dual encoder with only a document tower: a small Qwen2 with random weights."""
    texts = next(dataset.batches("documents", rows=2000))["content"].to_pylist()
    scratch = Scratch(
        layers=layers,
        hidden=hidden,
        heads=4,
        intermediate=2 * hidden,
        vocabulary=4000,
        max_positions=max_length + 32,
    )
    config = TowerConfig(backbone=scratch, prompt=PROMPT, max_length=max_length)
    learnt = backbone.train_tokenizer(texts, vocabulary=4000)
    draft = Draft(uri, kind="dual_encoder", config=Made(), parents={})
    made = dual_encoder.build_tower(config, role="document", dim=128, tokenizer_json=learnt, seed=0)
    made.save(Path(draft.path("document")))
    return draft.commit(counts={})


if __name__ == "__main__":
    main()
