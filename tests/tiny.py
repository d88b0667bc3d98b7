"""A tiny corpus that can be learnt: documents of random words, and queries of words of their document."""

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from scalingnote.core.config import Config
from scalingnote.models import backbone
from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.models.cross_encoder import CrossEncoder
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.train.config import DualPooledConfig

SHORT_PROMPT = "{title} [TITLE_QUERY] {topic} {content} [CONTENT_QUERY] [EMB]"
CAUSAL = Scratch(layers=1, hidden=32, heads=2, intermediate=48, vocabulary=400, max_positions=64)
BIDIRECTIONAL = CAUSAL.model_copy(update={"architecture": "bert"})
DOCUMENTS = 96
CROSS = {"query_length": 12, "document_length": 24}


class Nothing(Config):
    """Config of an artifact that no stage built."""


def words(rng: np.random.Generator, count: int) -> list[str]:
    syllables = ["ba", "ko", "li", "me", "nu", "ra", "si", "ta", "ve", "zo"]
    return ["".join(rng.choice(syllables, 3)) for _ in range(count)]


def document_rows(count: int = DOCUMENTS) -> list[dict[str, str]]:
    return [dict(row) for row in _document_rows(count)]


@functools.cache
def _document_rows(count: int) -> list[dict[str, str]]:
    rng = np.random.default_rng(7)
    return [
        {
            "doc_id": f"d{i:03d}",
            "title": " ".join(words(rng, 2)),
            "topic": f"topic {i % 4}",
            "content": " ".join(words(rng, 12)),
            "group": f"d{i:03d}",
        }
        for i in range(count)
    ]


def artifact(uri: str | Path, kind: str, tables: Mapping[str, Any], **counts: int) -> Artifact:
    """Build an artifact without settings and parents, of tables by the names of their files."""
    draft = Draft(str(uri), kind=kind, config=Nothing(), parents={})
    for name, columns in tables.items():
        draft.write_table(name, columns if isinstance(columns, pa.Table) else pa.table(columns))
    return draft.commit(counts=counts)


def dataset(uri: str, *, count: int = DOCUMENTS, rows_per_part: int = 32) -> Artifact:
    """Build a dataset artifact: one query per document, every eighth for test."""
    draft = Draft(uri, kind="dataset", config=Nothing(), parents={})
    documents = document_rows(count)
    for number, start in enumerate(range(0, count, rows_per_part)):
        piece = pa.Table.from_pylist(documents[start : start + rows_per_part], schema=schema.DOCUMENTS)
        draft.write_table(f"documents/part-{number:05d}.parquet", piece)
    queries, qrels = [], []
    for i, document in enumerate(documents):
        text = f"{document['title'].split()[0]} {document['content'].split()[3]}"
        split = "test" if i % 8 == 0 else "train"
        queries.append({"query_id": f"q{i:03d}", "query": text, "split": split})
        qrels.append({"query_id": f"q{i:03d}", "doc_id": document["doc_id"], "relevance": 1})
    draft.write_table("queries.parquet", pa.Table.from_pylist(queries, schema=schema.QUERIES))
    draft.write_table("qrels.parquet", pa.Table.from_pylist(qrels, schema=schema.QRELS))
    return draft.commit(
        counts={"documents": count, "queries": count},
        simulated_clicks=True,
        description="tiny",
    )


def triplets(uri: str, dataset: Artifact) -> Artifact:
    """Build triplets of the training queries, with the next training document as hard negative."""
    queries = [q for q in dataset.table("queries.parquet").to_pylist() if q["split"] == "train"]
    rows = [
        {
            "query_id": query["query_id"],
            "query": query["query"],
            "positive": "d" + query["query_id"][1:],
            "negatives": ["d" + other["query_id"][1:]],
            "source": "click",
            "hop": "one",
            "via": None,
            "weight": 1.0,
            "split": "validation" if i % 10 == 9 else "train",
        }
        for i, (query, other) in enumerate(itertools.pairwise([*queries, queries[0]]))
    ]
    draft = Draft(uri, kind="triplets", config=Nothing(), parents={"dataset": dataset})
    draft.write_table("triplets/part-00000.parquet", pa.Table.from_pylist(rows, schema=schema.TRIPLETS))
    return draft.commit(counts={"triplets": len(rows)}, simulated_clicks=True)


def cross_encoder(uri: str, *, pooling: str = "special", temperature: float | None = 0.05) -> Artifact:
    """Build an untrained cross-encoder, with the config of a training run."""
    texts = [" ".join(row.values()) for row in document_rows()]
    learnt = backbone.train_tokenizer(texts, vocabulary=400)
    config = DualPooledConfig(backbone=BIDIRECTIONAL, pooling=pooling, temperature=temperature, **CROSS)
    draft = Draft(uri, kind="cross_encoder", config=config, parents={})
    base = backbone.build(BIDIRECTIONAL, tokenizer_json=learnt, seed=0)
    CrossEncoder(base, pooling=pooling, dim=None, template="{title} {topic} {content}", **CROSS).save(
        Path(draft.path("model"))
    )
    return draft.commit(counts={})


def pair_classifier(
    folder: Path, texts: list[str], architecture: type = BertForSequenceClassification, **knobs: Any
) -> str:
    """Write an untrained cross-encoder of transformers with well separated scores; return its path."""
    tokenizer = Tokenizer.from_str(backbone.train_tokenizer(texts, vocabulary=300))
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=48,
        initializer_range=1.0,
        **{"num_labels": 1, **knobs},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        architecture(config).save_pretrained(folder)
    return str(folder)


def query_tower(backbone: Scratch = CAUSAL) -> TowerConfig:
    return TowerConfig(backbone=backbone, max_length=16)


def document_tower(backbone: Scratch = CAUSAL) -> TowerConfig:
    return TowerConfig(backbone=backbone, max_length=40, prompt=SHORT_PROMPT)
