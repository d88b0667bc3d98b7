"""The stage teacher where vectors are given: a file of texts and vectors becomes `query_embeddings`."""

from collections import Counter

import pyarrow as pa

from scalingnote.core.errors import DataError
from scalingnote.core.log import Progress, get_logger
from scalingnote.datasets.config import VectorsConfig
from scalingnote.datasets.vector_files import VectorFiles
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.shuffle import hash_of

log = get_logger("datasets")


def run(config: VectorsConfig, *, output: str) -> Artifact:
    """Build the artifact `query_embeddings` of a file; the rows that are set aside are its table `rejected`.

    Held out are some of the queries, or of the texts if there are no queries.

    Raises:
        DataError: a file cannot be read, or the vectors of texts and queries have different lengths.
    """
    draft = Draft(output, kind="query_embeddings", config=config, parents={})
    if draft.finished:
        return draft.existing()
    draft.discard_parts()  # the files may have changed since an interrupted run
    sources = open_files(config)
    counts = {"queries": 0, "validation": 0}
    rejected: list[pa.Table] = []
    for number, files in enumerate(sources):
        share = config.validation_share if files is sources[-1] else 0.0
        with Progress("datasets", total=0, unit=f"texts with vectors of {files.path}") as progress:
            for block, table in enumerate(files.tables()):
                if files.dim != sources[0].dim:
                    raise DataError(
                        f"{files.path} has vectors of {files.dim:,} values, {sources[0].path} of "
                        f"{sources[0].dim:,}: both are to be of one model"
                    )
                held_out = hash_of(table["query"]) < share * 2.0**64
                split = pa.array(["validation" if held else "train" for held in held_out.tolist()])
                draft.write_table(
                    f"embeddings/part-{number}-{block:05d}.parquet", table.append_column("split", split)
                )
                counts["queries"] += len(table)
                counts["validation"] += int(held_out.sum())
                progress.advance(len(table))
        rejected.append(files.quarantine.table())
        counts["rejected"] = counts.get("rejected", 0) + sum(files.quarantine.rejected.values())
        if files.quarantine.rejected:
            log.warning("%s%s", files.path, files.quarantine.reasons())
    draft.write_table("rejected.parquet", pa.concat_tables(rejected))
    reasons = Counter[str]()
    for files in sources:
        for key, count in files.quarantine.rejected.items():
            reasons[key.partition(": ")[2]] += count
    return draft.commit(counts=counts, similarity="cosine", rejected_by_reason=dict(reasons))


def open_files(config: VectorsConfig) -> list[VectorFiles]:
    """The files of texts, then that of queries, whose columns are known; DataError before any is read."""
    columns = {str(ours): theirs for ours, theirs in config.columns.items()}
    opened = [VectorFiles(config.path, texts=config.texts, columns=columns)]
    if config.queries is not None:
        opened.append(VectorFiles(config.queries, texts=None, columns=columns))
    return opened
