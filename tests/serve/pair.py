"""A small real index and a query tower with the same dimension, for a gateway."""

from pathlib import Path
from typing import Any

import tiny
from in_process import run_without_ray
from scalingnote.index import job
from scalingnote.index.config import FastScan, IndexConfig
from scalingnote.models import dual_encoder, lookup
from scalingnote.models.backbone import train_tokenizer
from scalingnote.models.config import LookupConfig
from scalingnote.storage.artifact import Artifact, Draft
from synthetic_corpus import Corpus

DIM = 16


def built(folder: Path, *, corpus_seed: int = 0, shards: int = 2) -> Artifact:
    """Build an index in this process."""
    corpus = Corpus.build(f"{folder}/corpus", sizes=[200, 220], dim=DIM, seed=corpus_seed)
    config = IndexConfig(
        shards=shards,
        family=FastScan(refine="flat"),
        nlist=4,
        nprobe=4,
        refine_factor=100,
        filters=("topic",),
    )
    return run_without_ray(job.run, config, **corpus.uris, output=f"{folder}/index")


def student(uri: str, *, dim: int = DIM, seed: int = 0) -> Artifact:
    return _save(
        uri,
        dual_encoder.build_tower(
            tiny.query_tower(), role="query", dim=dim, tokenizer_json=_tokenizer_json(), seed=seed
        ),
    )


def table(uri: str, *, seed: int = 0) -> Artifact:
    """Build a student that is a table of random rows."""
    return _save(uri, lookup.build(LookupConfig(), dim=DIM, tokenizer_json=_tokenizer_json(), seed=seed))


def document_tower(uri: str) -> Artifact:
    tower = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=DIM, tokenizer_json=_tokenizer_json(), seed=3
    )
    return _save(uri, tower, kind="dual_encoder", side="document")


def _tokenizer_json() -> str:
    texts = [row["content"] for row in tiny.document_rows()]
    return train_tokenizer(texts, vocabulary=tiny.CAUSAL.vocabulary)


def _save(uri: str, tower: Any, *, kind: str = "student", side: str = "query") -> Artifact:
    draft = Draft(uri, kind=kind, config=tiny.Nothing(), parents={})
    tower.save(Path(draft.path(side)))
    return draft.commit(counts={})
