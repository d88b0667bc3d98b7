"""Inputs of the tests of encoding: documents in parts, and untrained towers with a tokenizer of them."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import tiny
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.config import TowerConfig
from scalingnote.models.tower import Tower
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft

TOO_LONG = "word " * 200  # a title that is too long for these towers


@functools.cache
def learnt() -> str:
    """Train a tokenizer on the tiny documents."""
    return backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)


def tower(config: TowerConfig | None = None, *, role: str = "document", **options: Any) -> Tower:
    config = config or (tiny.document_tower() if role == "document" else tiny.query_tower(tiny.BIDIRECTIONAL))
    return dual_encoder.build_tower(config, role=role, dim=16, tokenizer_json=learnt(), seed=0, **options)


def towers(uri: Path, *made: Tower, kind: str = "dual_encoder") -> Artifact:
    """Save an artifact of towers."""
    draft = Draft(str(uri), kind=kind, config=tiny.Nothing(), parents={})
    for each in made:
        each.save(Path(draft.path(each.role)))
    return draft.commit(counts={})


def dataset(uri: Path, rows: Sequence[dict[str, Any]], *, rows_per_part: int = 16) -> Artifact:
    draft = Draft(str(uri), kind="dataset", config=tiny.Nothing(), parents={})
    for number, start in enumerate(range(0, len(rows), rows_per_part)):
        part = pa.Table.from_pylist(rows[start : start + rows_per_part], schema=schema.DOCUMENTS)
        draft.write_table(f"documents/part-{number:05d}.parquet", part)
    return draft.commit(counts={"documents": len(rows)})
