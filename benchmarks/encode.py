"""Encoding documents: the Ray job against the bare forward pass, and against sentence-transformers.

    python -m benchmarks.encode --json docs/results/encode.json

- floor: only the tower's forward pass, one thread, on token rows packed before the clock starts
- job: the stage as users run it, one worker of one thread: reading, hashing, tokenising, encoding, writing
  and committing; without Ray's start and the loading of the model, which do not grow with the documents
- sentence-transformers: `encode` on the same weights and documents, one thread, its best batch size

Each runs over documents of mixed and of equal length, in tokens per second; the job also with two workers.
"""

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
TRIED_DOCUMENTS = 1500  # to choose a side's best size
WORDS, SPREAD = 60, 0.8  # of a document: the median, and the deviation of the logarithm
LAYERS, HIDDEN = 2, 256  # of the tower
OURS, PEER = "job, 1 worker", "sentence-transformers"
Row = dict[str, Any]
SYLLABLES = np.array(["ba", "ko", "li", "me", "nu", "ra", "si", "ta", "ve", "zo", "che", "dri", "flo", "gu"])
PROMPT = "{title} [TITLE_QUERY] {topic}: {content} [CONTENT_QUERY] [EMB]"


class Made(Config):
    """Config of the inputs of this benchmark."""


def main() -> None:
    options = arguments(__doc__, documents=6144, rounds=3).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            lengths: measure_speed(Path(folder, lengths), options.documents, spread, rounds=options.rounds)
            for lengths, spread in (("mixed", SPREAD), ("equal", 0.0))
        }
    metrics = ratios(found["mixed"])
    metrics |= {f"{name}_equal_lengths": value for name, value in ratios(found["equal"]).items()}
    speeds = [row for lengths, sides in found.items() for row in medians(lengths, sides)]
    show(f"{options.documents:,} documents, {LAYERS} layers of {HIDDEN}", speeds)
    write(options.json, metrics=metrics, speeds=speeds)


def measure_speed(folder: Path, documents: int, spread: float, *, rounds: int) -> dict[str, list[Row]]:
    """Measure the rates of all sides, which take turns in each round."""
    folder.mkdir()
    dataset = make_documents(f"{folder}/dataset", documents, rows_per_part=512, spread=spread)
    towers = make_towers(f"{folder}/towers", dataset, layers=LAYERS, hidden=HIDDEN)
    uris = dataset.uri, towers.uri
    budget, batch = (
        max(sizes, key=lambda size: run_isolated(side, *uris, size, TRIED_DOCUMENTS)["tokens/s"])
        for side, sizes in ((floor, BUDGETS), (peer, BATCHES))
    )
    sides: dict[str, Callable[[int], Row]] = {
        "floor": lambda _: run_isolated(floor, *uris, budget),
        OURS: lambda n: run_isolated(job_speed, *uris, budget, f"{folder}/one-{n}", workers=1),
        PEER: lambda _: run_isolated(peer, *uris, batch),
        "job, 2 workers": lambda n: run_isolated(job_speed, *uris, budget, f"{folder}/two-{n}", workers=2),
    }
    rows_by_side: dict[str, list[Row]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            rows_by_side[name].append(side(number))
    return rows_by_side


def medians(lengths: str, found: dict[str, list[Row]]) -> list[Row]:
    """Return a row for each side."""
    middle = {name: float(np.median([row["tokens/s"] for row in rows])) for name, rows in found.items()}
    return [
        {
            "side": name,
            "lengths": lengths,
            "tokens/s": rate,
            "of the floor": rate / middle["floor"],
            "micro-batch": found[name][0]["micro-batch"],
        }
        for name, rate in middle.items()
    ]


def ratios(found: dict[str, list[Row]]) -> dict[str, float]:
    """Return medians of the rounds' ratios, which do not change if the machine slows down between rounds."""

    def over(side: str, other: str) -> float:
        pairs = zip(found[side], found[other], strict=True)
        return float(np.median([mine["tokens/s"] / theirs["tokens/s"] for mine, theirs in pairs]))

    metrics = {
        "tokens_per_s_over_floor": over(OURS, "floor"),
        "tokens_per_s_over_sentence_transformers": over(OURS, PEER),
        "two_workers_over_twice_one": over("job, 2 workers", OURS) / 2,
    }
    return {name: round(value, 3) for name, value in metrics.items()}


def rate(work: Callable[[], object], tokens: int, size: str) -> Row:
    """Measure the tokens per second of some work."""
    start = time.perf_counter()
    work()
    return {"tokens/s": tokens / (time.perf_counter() - start), "micro-batch": size}


def floor(dataset: str, towers: str, budget: int, most: int | None = None) -> Row:
    """Measure the forward pass over rows that are already tokenised, sorted and packed."""
    import torch

    from scalingnote.encode.documents import tokenise
    from scalingnote.encode.encoder import by_tokens
    from scalingnote.encode.engines import load_document_encoder, load_document_prompt
    from scalingnote.models.batch import collate

    torch.set_num_threads(1)
    dual_encoder = open_artifact(towers, kind="dual_encoder")
    table = open_artifact(dataset, kind="dataset").table("documents").slice(0, most)
    rows = tokenise(table, load_document_prompt(dual_encoder)).rows
    tower = load_document_encoder(dual_encoder, budget).tower
    lengths = [len(row.ids) for row in rows]
    batches = [
        collate([rows[i] for i in chosen], pad=tower.pad, packed=tower.packs)
        for chosen in by_tokens(lengths, budget=budget, packed=tower.packs)
    ]
    with torch.inference_mode():
        tower(batches[0])
        return rate(lambda: [tower(batch) for batch in batches], sum(lengths), f"{budget} tokens")


def job_speed(dataset: str, towers: str, budget: int, output: str, *, workers: int) -> Row:
    """Measure the stage, from reading the first document to committing the last."""
    from scalingnote.core import cluster
    from scalingnote.encode import job
    from scalingnote.encode.config import EncodeConfig, Fleet

    cluster.connect()
    config = EncodeConfig(token_budget=budget, resources=Fleet(workers=workers))
    encoding = job.run(config, dataset=dataset, dual_encoder=towers, output=output).manifest.info["encoding"]
    speed = workers * encoding["tokens"] / encoding["worker_seconds"]
    return {"tokens/s": speed, "micro-batch": f"{budget} tokens"}


def peer(dataset: str, towers: str, batch: int, most: int | None = None) -> Row:
    """Measure sentence-transformers on the folder of a saved tower, from texts to unit vectors."""
    import torch
    from sentence_transformers import SentenceTransformer

    from scalingnote.encode.documents import tokenise
    from scalingnote.encode.engines import load_document_prompt
    from scalingnote.models.library_export import document_layout

    torch.set_num_threads(1)
    dual_encoder = open_artifact(towers, kind="dual_encoder")
    table = open_artifact(dataset, kind="dataset").table("documents").slice(0, most)
    folder = dual_encoder.directory("document")
    model = SentenceTransformer(str(folder), device="cpu")
    layout = document_layout(dual_encoder.read_json("document/tower.json")["prompt"], causal=True)
    texts = [layout.format(**row) for row in table.select(["title", "topic", "content"]).to_pylist()]
    rows = tokenise(table, load_document_prompt(dual_encoder)).rows
    settings: Row = {"batch_size": batch, "normalize_embeddings": True, "show_progress_bar": False}
    model.encode(texts[:16], **settings)
    tokens = sum(len(row.ids) for row in rows)
    return rate(lambda: model.encode(texts, **settings), tokens, f"{batch} rows")


def make_documents(uri: str, count: int, *, rows_per_part: int, spread: float) -> Artifact:
    """Write a dataset with contents of WORDS words at the median, log-normal with deviation `spread`."""
    rng = np.random.default_rng(0)
    vocabulary = np.array(["".join(word) for word in rng.choice(SYLLABLES, (4000, 3))])
    draft = Draft(uri, kind="dataset", config=Made(), parents={})
    for number, start in enumerate(range(0, count, rows_per_part)):
        size = min(rows_per_part, count - start)
        lengths = np.maximum(np.exp(rng.normal(np.log(WORDS), spread, size)).astype(int), 1)
        words = vocabulary[(rng.pareto(1.0, lengths.sum()) * 20).astype(int) % len(vocabulary)].tolist()
        stops = np.cumsum(lengths).tolist()
        rows = [
            {
                "doc_id": f"d{start + i:09d}",
                "title": " ".join(words[stop - length : stop][:3]),
                "topic": f"topic {i % 8}",
                "content": " ".join(words[stop - length : stop]),
                "group": "",
            }
            for i, (length, stop) in enumerate(zip(lengths.tolist(), stops, strict=True))
        ]
        part = pa.Table.from_pylist(rows, schema=schema.DOCUMENTS)
        draft.write_table(f"documents/part-{number:05d}.parquet", part)
    return draft.commit(counts={"documents": count})


def make_towers(uri: str, dataset: Artifact, *, layers: int, hidden: int) -> Artifact:
    """Write a dual encoder with only a document tower: a small Qwen2 with random weights."""
    texts = next(dataset.batches("documents", rows=2000))["content"].to_pylist()
    scratch = Scratch(
        layers=layers, hidden=hidden, heads=4, intermediate=2 * hidden, vocabulary=4000, max_positions=544
    )
    config = TowerConfig(backbone=scratch, prompt=PROMPT, max_length=512)
    learnt = backbone.train_tokenizer(texts, vocabulary=4000)
    draft = Draft(uri, kind="dual_encoder", config=Made(), parents={})
    tower = dual_encoder.build_tower(config, role="document", dim=128, tokenizer_json=learnt, seed=0)
    tower.save(Path(draft.path("document")))
    return draft.commit(counts={})


if __name__ == "__main__":
    main()
