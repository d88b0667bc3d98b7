"""Readers of complete TREC files, with the functions by which stages read slices."""

import pyarrow as pa

from scalingnote.datasets.input_files import find_files, whole
from scalingnote.datasets.readers import RUN_ROWS, read_run_slice
from scalingnote.storage import filesystem as fs
from scalingnote.storage import trec


def read_qrels(uri: str) -> trec.Qrels:
    """Read query_id -> doc_id -> relevance."""
    qrels: trec.Qrels = {}
    for query_id, doc_id, grade in trec.qrels_rows(fs.read_bytes(uri).split(b"\n"), uri):
        qrels.setdefault(query_id, {})[doc_id] = grade
    return qrels


def read_run(uri: str) -> trec.Run:
    """Read query_id -> (doc_id, score), best first."""
    (file,) = find_files(uri, ("",))
    return trec.ordered_run(pa.concat_tables([RUN_ROWS.empty_table(), read_run_slice(whole(file))]), uri)
