"""Documents of a dataset by their ids, found in tasks: only those asked for reach the caller."""

from collections.abc import Iterable
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner


def find_documents(
    dataset: Artifact, doc_ids: Iterable[str], columns: list[str], *, each: TaskRunner = map
) -> pa.Table:
    """The documents with these ids, in the order of the ids; those that do not exist are left out."""
    ids = pa.array(sorted(set(doc_ids)), pa.string())
    task = partial(_documents_of_slice, dataset=dataset, doc_ids=ids, columns=["doc_id", *columns])
    return pa.concat_tables(each(task, shuffle.slices(dataset, "documents"))).sort_by("doc_id")


def _documents_of_slice(
    parts: list[str], *, dataset: Artifact, doc_ids: pa.Array, columns: list[str]
) -> pa.Table:
    return pa.concat_tables(
        pa.Table.from_batches([batch.filter(pc.is_in(batch["doc_id"], value_set=doc_ids))])
        for part in parts
        for batch in dataset.batches(part, columns=columns)
    )
