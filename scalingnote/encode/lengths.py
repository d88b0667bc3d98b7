"""How many texts of a data set are longer than a model reads, and how much of them is lost."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from scalingnote.datasets.column_checks import MAX_CONTENT_CHARS
from scalingnote.datasets.passages import settings
from scalingnote.encode.documents import content_hashes, load_document_prompt, tokenise
from scalingnote.encode.parts import cut_summary
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import CONTENT_HASH, DOCUMENT_COLUMNS

LENGTH_PARTS, LENGTH_ROWS = 16, 2_000  # that are read to tell how long texts are


def sample_counts(dataset: Artifact, towers: Artifact) -> dict[str, int]:
    """``documents``, ``tokens``, ``cut_texts`` and ``lost_tokens`` of texts drawn evenly from a data set.

    Args:
        dataset: the documents, of which LENGTH_ROWS are read at most.
        towers: an artifact with the document tower, of which the tokenizer is read alone.
    """
    parts = dataset.table_parts("documents")
    chosen = [parts[n] for n in np.unique(np.linspace(0, len(parts) - 1, LENGTH_PARTS).astype(int)).tolist()]
    prompt, counts = load_document_prompt(towers), dict.fromkeys(("documents", "tokens"), 0)
    counts |= {"cut_texts": 0, "lost_tokens": 0}
    for part in chosen:
        table = dataset.table(part, DOCUMENT_COLUMNS)
        rows = np.unique(np.linspace(0, len(table) - 1, LENGTH_ROWS // len(chosen)).astype(int))
        table = table.take(pa.array(rows))
        tokens, _ = tokenise(table.append_column(CONTENT_HASH, content_hashes(table)), prompt)
        lost = tokens["lost"].to_numpy()
        counts["documents"] += len(tokens)
        counts["tokens"] += len(tokens["ids"].combine_chunks().values)
        counts["cut_texts"] += int(np.count_nonzero(lost))
        counts["lost_tokens"] += int(lost.sum())
    return counts


def summary(built: Mapping[str, Artifact]) -> str:
    """What was divided and what was cut, in words; of a sample where the documents are not encoded.

    Args:
        built: artifacts by kind. Without a data set or a tower, as of a teacher known by its vectors, nothing
            is said of them.
    """
    dataset, towers = built.get("dataset"), built.get("dual_encoder")
    said = []
    if dataset is not None and (passages := settings(dataset)) is not None:
        whole, rows = dataset.manifest.info["whole_documents"], dataset.counts["documents"]
        said.append(f"{whole:,} documents are {rows:,} passages of at most {passages.max_tokens} tokens")
    elif dataset is not None and (cut := dataset.manifest.info["repaired"].get("content_truncated")):
        said.append(f"{cut:,} texts are cut at {MAX_CONTENT_CHARS:,} characters")
    if dataset is not None and towers is not None:
        embeddings = built.get("embeddings")
        said.append(cut_summary(sample_counts(dataset, towers) if embeddings is None else embeddings.counts))
    return "; ".join(filter(None, said))
