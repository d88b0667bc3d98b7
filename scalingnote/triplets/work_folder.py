"""The work folder of a stage: tables between its tasks, whole or scattered into buckets.

A stage's context is one: it has the inputs that all tasks share, and is small. A task names what it writes
after its own input, so that a repeated task replaces its files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from jaxtyping import Int64
from numpy import ndarray

from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact, read_table, write_table


@dataclass(frozen=True)
class WorkFolder:
    """Tables in a folder."""

    folder: str
    buckets: int  # into which tables are scattered by the hash of a key

    def path(self, name: str) -> str:
        """URI of a file or folder."""
        return fs.join(self.folder, name)

    def write(self, name: str, table: pa.Table) -> int:
        """Write a table; returns its rows."""
        return write_table(self.path(f"{name}.parquet"), table).rows or 0

    def read(self, name: str) -> pa.Table:
        """A table that was written."""
        return read_table(self.path(f"{name}.parquet"))

    def scatter(self, table: pa.Table, by: str | Int64[ndarray, " rows"], target: str, name: str) -> None:
        """Write rows to buckets of `target`, by the hash of a column or by the bucket of each row.

        `name` is that of the task: unique in `target`.
        """
        bucket = shuffle.bucket_of(table[by], self.buckets) if isinstance(by, str) else by
        shuffle.scatter(table, bucket, target=self.path(target), name=name)

    def gather(self, target: str, bucket: int, schema: pa.Schema) -> pa.Table:
        """All rows of a bucket of `target`."""
        return shuffle.gather(self.path(target), bucket, schema=schema)


def read_slice(artifact: Artifact, parts: Sequence[str], columns: list[str]) -> pa.Table:
    """Columns of some parts of a table, joined."""
    return pa.concat_tables(artifact.table(part, columns) for part in parts)
