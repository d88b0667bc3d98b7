"""What the measurements of encoding share: documents of mixed length, and a tower with random weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from scalingnote.config import Config
from scalingnote.encode.encodings import Cost
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft

SYLLABLES = np.array(["ba", "ko", "li", "me", "nu", "ra", "si", "ta", "ve", "zo", "che", "dri", "flo", "gu"])
PROMPT = "{title} [TITLE_QUERY] {topic}: {content} [CONTENT_QUERY] [EMB]"


class Made(Config):
    """The config of inputs made up here."""


def documents(uri: str, count: int, *, rows_per_part: int, words: float, spread: float) -> Artifact:
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


def towers(uri: str, dataset: Artifact, *, layers: int, hidden: int, max_length: int = 512) -> Artifact:
    """A dual encoder that has a document tower alone: a small Qwen2, as random as it was born."""
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


class NoEncoder:
    """Gives zeros at once: what is left is the job's own work."""

    views, dim = ("summary",), 128

    def peak(self) -> float:
        """None."""
        return 0.0

    def encode_with_cost(self, rows: list[Any], *, top_k: int) -> Any:
        """Zeros, with the interface of an encoder; its module loads torch, which is not measured here."""
        embeddings = np.zeros((len(rows), 1, self.dim), np.float32)
        return SimpleNamespace(embeddings=embeddings, terms=None, cost=Cost())


def no_encoder(_: Artifact, __: int) -> NoEncoder:
    """As a reader of documents wants it."""
    return NoEncoder()
