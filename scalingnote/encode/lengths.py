"""Counts of texts that are longer than a model reads, and of their tokens that are lost."""

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

LENGTH_PARTS, LENGTH_ROWS = 16, 2_000  # sample of documents whose lengths are counted


def cut_of(rows: Iterable[TokenRow]) -> Cost:
    """Count the token rows that are cut, and the tokens that they lost."""
    lost = [row.lost for row in rows if row.lost]
    return Cost(cut_texts=len(lost), lost_tokens=sum(lost))


def cut_counts(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Sum ``cut_texts`` and ``lost_tokens`` over records of parts; those of earlier releases lack them."""
    records = list(records)
    return {name: sum(each.get(name, 0) for each in records) for name in ("cut_texts", "lost_tokens")}


def cut_summary(counts: Mapping[str, int]) -> str:
    """Describe the cut texts by the counts of an artifact of embeddings; empty if they are not counted."""
    if "cut_texts" not in counts:
        return ""
    texts, cut = counts["documents"], counts["cut_texts"]
    if not cut:
        return f"none of {texts:,} texts is longer than the model reads"
    share = lost_share(counts)
    return f"{cut:,} of {texts:,} texts are longer than the model reads: {share:.1%} of all tokens are lost"


def lost_share(counts: Mapping[str, int]) -> float:
    """Compute the share of all tokens that are lost."""
    return counts["lost_tokens"] / max(counts["tokens"] + counts["lost_tokens"], 1)


def sample_counts(dataset: Artifact, towers: Artifact) -> dict[str, int]:
    """Count ``documents``, ``tokens``, ``cut_texts`` and ``lost_tokens`` of an even sample of a data set.

    Args:
        dataset: the documents; at most LENGTH_ROWS are tokenised.
        towers: artifact with the document tower; only its prompt and tokenizer are read.
    """
    prompt, rows = load_document_prompt(towers), list[TokenRow]()
    parts = dataset.table_parts("documents")
    part_numbers = np.unique(np.linspace(0, len(parts) - 1, LENGTH_PARTS).astype(int)).tolist()
    for number in part_numbers:
        table = dataset.table(parts[number], TEXT_COLUMNS)
        row_numbers = np.unique(np.linspace(0, len(table) - 1, LENGTH_ROWS // len(part_numbers)).astype(int))
        token_rows = prompt.rows(*document_fields(table.take(pa.array(row_numbers))))
        rows += [row for row in token_rows if isinstance(row, TokenRow)]
    cut = cut_of(rows)
    tokens = sum(len(row.ids) for row in rows)
    return {
        "documents": len(rows),
        "tokens": tokens,
        "cut_texts": cut.cut_texts,
        "lost_tokens": cut.lost_tokens,
    }


def summary(built: Mapping[str, Artifact]) -> str:
    """Describe how documents were divided and cut, by a sample if the documents are not encoded.

    Args:
        built: artifacts by kind. Nothing is reported that needs a missing data set or a missing tower, for
            example if a teacher is known only by its vectors.
    """
    dataset, towers = built.get("dataset"), built.get("dual_encoder")
    sentences = []
    if dataset is not None and (passages := settings(dataset)) is not None:
        whole, rows = dataset.manifest.info["whole_documents"], dataset.counts["documents"]
        sentences.append(f"{whole:,} documents are {rows:,} passages of at most {passages.max_tokens} tokens")
    elif dataset is not None and (cut := dataset.manifest.info["repaired"].get("content_truncated")):
        sentences.append(f"{cut:,} texts are cut at {MAX_CONTENT_CHARS:,} characters")
    if dataset is not None and towers is not None:
        embeddings = built.get("embeddings")
        sentences.append(
            cut_summary(sample_counts(dataset, towers) if embeddings is None else embeddings.counts)
        )
    return "; ".join(filter(None, sentences))
