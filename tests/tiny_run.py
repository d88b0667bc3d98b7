"""A run of the tiny corpus through every stage: its config, and the stages without a cluster."""

import json
from pathlib import Path

import pytest
import yaml

import tiny
from in_process import without_ray
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig
from scalingnote.storage.artifact import Artifact


def write_lines(path: Path, rows: list[dict]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def write_config(folder: Path) -> Path:
    documents = tiny.document_rows()
    queries = [
        {"query_id": f"q{i}", "query": f"{row['title']} {row['content'][:12]}"}
        for i, row in enumerate(documents)
    ]
    qrels = [
        {"query_id": f"q{i}", "doc_id": row["doc_id"], "relevance": 1} for i, row in enumerate(documents)
    ]
    settings = {
        "dataset": {
            "name": "columns",
            "documents": write_lines(folder / "documents.jsonl", documents),
            "queries": write_lines(folder / "queries.jsonl", queries),
            "qrels": write_lines(folder / "qrels.jsonl", qrels),
            "documents_per_part": 4,
        },
        "collect": {"decontamination": False, "top_k": 2, "top_t": 10, "resources": {"workers": 1}},
        # One worker each: these tests do not need a second one, and its start takes long.
        "planner": {"kind": "statistics", "resources": {"workers": 1}},
        "encode": {"resources": {"workers": 1}},
        "train": {
            "query": tiny.query_tower().model_dump(),
            "document": tiny.document_tower().model_dump(),
            "dim": 16,
            "losses": {"matryoshka": [8, 16]},
            "global_batch": 16,
            "epochs": 8,
            "checkpoint_every": 4,
            "resources": {"workers": 1},
        },
        "distill": None,
        "quantize": {"levels": 2, "codes": 8, "resources": {"workers": 1}},
        "index": {"nlist": 2, "nprobe": 2, "refine_factor": 4},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
    return path


def run_here(config: RunConfig, *, until: str | None = None) -> dict[str, Artifact]:
    """Run all stages without a cluster; the tests of each stage use a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return pipeline.run(config, stages.select(config, until=until))
