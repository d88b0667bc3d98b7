"""Files of rows in users' formats, and the data set of a config, built in this process."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from scalingnote.datasets import job, sources
from scalingnote.datasets.config import Columns, Logs
from scalingnote.storage.artifact import Artifact, Draft


def write_lines(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    """Write JSON lines; rows of bytes are written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    )
    return path


def write_tables(folder: Path, **tables: Iterable[dict[str, Any] | bytes]) -> dict[str, dict[str, str]]:
    """Write each table as a file of JSON lines; return the fields of a config with these files."""
    return {
        name: {"path": str(write_lines(folder / f"{name}.jsonl", *rows))} for name, rows in tables.items()
    }


def build(config: Columns | Logs, output: Path, *, each: Callable[..., Iterable[Any]] = map) -> Artifact:
    """Build the data set of a config, with `each` to run the tasks, or open a finished one."""
    draft = Draft(str(output), kind="dataset", config=config, parents={})
    return draft.existing() if draft.finished else job.build(config, sources.read(config), draft, each=each)


def table_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Build a table from rows with their values in the order of the columns."""
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)
