"""The sides of a data set: what it is tested on, and what training may see, which is none of that.

Nothing here holds more than the test side, however many queries and documents there are for training.
"""

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import QRELS, QUERIES


def queries(dataset: Artifact, split: str) -> pa.Table:
    """query_id and query of one split."""
    kept = [b.filter(pc.equal(b["split"], split)) for b in dataset.batches("queries")]
    return pa.Table.from_batches(kept, schema=QUERIES).select(["query_id", "query"])


def judgements(dataset: Artifact, query_ids: pa.ChunkedArray) -> pa.Table:
    """Of these queries, as QRELS."""
    wanted = query_ids.combine_chunks()
    batches = dataset.batches("qrels", columns=QRELS.names)
    kept = [b.filter(pc.is_in(b["query_id"], value_set=wanted)).select(QRELS.names) for b in batches]
    return pa.Table.from_batches(kept) if kept else QRELS.empty_table()


def held_out_documents(dataset: Artifact) -> pa.Array:
    """doc_ids of every group that a test query's relevant document belongs to; all others may train.

    A data set whose info says ``hold_out_documents: false`` is split by time: what was clicked before and
    after is one document, and only queries are held out (ScalingNote, section 4.1.2).
    """
    if not dataset.manifest.info.get("hold_out_documents", True):
        return pa.array([], pa.string())
    test = queries(dataset, "test")["query_id"].combine_chunks()
    relevant = [
        b.filter(pc.and_(pc.greater(b["relevance"], 0), pc.is_in(b["query_id"], value_set=test)))["doc_id"]
        for b in dataset.batches("qrels")
    ]
    chosen = pa.concat_arrays([pa.array([], pa.string()), *relevant]).unique()
    columns = ["doc_id", "group"]
    # A document without a group stands alone: only itself can be a test document.
    groups = [
        b["group"].filter(pc.and_(pc.is_in(b["doc_id"], value_set=chosen), _grouped(b)))
        for b in dataset.batches("documents", columns=columns)
    ]
    tested = pa.concat_arrays([pa.array([], pa.string()), *groups]).unique()
    held_out = [
        b["doc_id"].filter(
            pc.or_(
                pc.is_in(b["doc_id"], value_set=chosen),
                pc.and_(_grouped(b), pc.is_in(b["group"], value_set=tested)),
            )
        )
        for b in dataset.batches("documents", columns=columns)
    ]
    return pa.concat_arrays([pa.array([], pa.string()), *held_out])


def _grouped(batch: pa.RecordBatch) -> pa.Array:
    return pc.not_equal(pc.fill_null(batch["group"], ""), "")
