"""The work folder of a stage: tables between its tasks, as one file or scattered into buckets.

The context of a stage is a work folder with the inputs that all tasks share; it is small. A task names its
output files after its input, so that a repeated task replaces its files.
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
    buckets: int  # number of buckets that tables are scattered into, by the hash of a key

    def path(self, name: str) -> str:
        """Return the URI of a file or folder."""
        return fs.join(self.folder, name)

    def write(self, name: str, table: pa.Table) -> int:
        """Write a table; return its number of rows."""
        return write_table(self.path(f"{name}.parquet"), table).rows or 0

    def read(self, name: str) -> pa.Table:
        """Read a table that was written."""
        return read_table(self.path(f"{name}.parquet"))

    def scatter(self, table: pa.Table, by: str | Int64[ndarray, " rows"], target: str, name: str) -> None:
        """Write rows to buckets of `target`, by the hash of a column or by the bucket of each row.

        `name` is the name of the task, unique in `target`.
        """
        bucket = shuffle.bucket_of(table[by], self.buckets) if isinstance(by, str) else by
        shuffle.scatter(table, bucket, target=self.path(target), name=name)

    def gather(self, target: str, bucket: int, schema: pa.Schema) -> pa.Table:
        """Read all rows of a bucket of `target`."""
        return shuffle.gather(self.path(target), bucket, schema=schema)


def read_slice(artifact: Artifact, parts: Sequence[str], columns: list[str]) -> pa.Table:
    """Read columns of some parts of a table, concatenated."""
    return pa.concat_tables(artifact.table(part, columns) for part in parts)
