"""How many texts are longer than a model reads, and how much of them is lost."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from scalingnote.datasets.column_checks import MAX_CONTENT_CHARS
from scalingnote.datasets.passages import settings
from scalingnote.encode.engines import Cost, load_document_prompt
from scalingnote.models.prompt import TokenRow, document_fields
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import TEXT_COLUMNS

LENGTH_PARTS, LENGTH_ROWS = 16, 2_000  # that are read to tell how long texts are


def cut_of(rows: Iterable[TokenRow]) -> Cost:
    """How many token rows are cut, and of how many tokens."""
    lost = [row.lost for row in rows if row.lost]
    return Cost(cut_texts=len(lost), lost_tokens=sum(lost))


def cut_counts(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """``cut_texts`` and ``lost_tokens`` over the records of parts; an earlier release counted none."""
    records = list(records)
    return {name: sum(each.get(name, 0) for each in records) for name in ("cut_texts", "lost_tokens")}


def cut_summary(counts: Mapping[str, int]) -> str:
    """What was cut, in words: of the counts of an artifact of embeddings; empty if they do not tell."""
    if "cut_texts" not in counts:
        return ""
    texts, cut = counts["documents"], counts["cut_texts"]
    if not cut:
        return f"none of {texts:,} texts is longer than the model reads"
    share = lost_share(counts)
    return f"{cut:,} of {texts:,} texts are longer than the model reads: {share:.1%} of all tokens are lost"


def lost_share(counts: Mapping[str, int]) -> float:
    """The share of all tokens that were cut."""
    return counts["lost_tokens"] / max(counts["tokens"] + counts["lost_tokens"], 1)


def sample_counts(dataset: Artifact, towers: Artifact) -> dict[str, int]:
    """``documents``, ``tokens``, ``cut_texts`` and ``lost_tokens`` of texts drawn evenly from a data set.

    Args:
        dataset: the documents, of which LENGTH_ROWS are read at most.
        towers: an artifact with the document tower, of which the tokenizer is read alone.
    """
    prompt, rows = load_document_prompt(towers), list[TokenRow]()
    parts = dataset.table_parts("documents")
    chosen = np.unique(np.linspace(0, len(parts) - 1, LENGTH_PARTS).astype(int)).tolist()
    for number in chosen:
        table = dataset.table(parts[number], TEXT_COLUMNS)
        drawn = np.unique(np.linspace(0, len(table) - 1, LENGTH_ROWS // len(chosen)).astype(int))
        found = prompt.rows(*document_fields(table.take(pa.array(drawn))))
        rows += [row for row in found if isinstance(row, TokenRow)]
    cut = cut_of(rows)
    tokens = sum(len(row.ids) for row in rows)
    return {
        "documents": len(rows),
        "tokens": tokens,
        "cut_texts": cut.cut_texts,
        "lost_tokens": cut.lost_tokens,
    }


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
