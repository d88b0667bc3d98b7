"""The language of a dataset's documents, which decides what their words are for BM25."""

from typing import Literal

from scalingnote.core.bm25 import document_texts, terms
from scalingnote.core.log import get_logger
from scalingnote.core.words import Language, detect
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import TEXT_COLUMNS

SAMPLED_PARTS = 8  # of the documents, at equal distances
SAMPLED_DOCUMENTS = 256  # the first ones of each of these parts


def language_of(dataset: Artifact, chosen: Language | Literal["auto"] = "auto", *, section: str) -> Language:
    """The language that is chosen, or if that is "auto", the one :func:`detect` finds in a sample.

    Args:
        dataset: the same dataset gives the same language.
        chosen: in the config.
        section: name of the logger.
    """
    if chosen != "auto":
        return chosen
    parts = dataset.table_parts("documents")
    sample = (
        dataset.table(part, TEXT_COLUMNS).slice(0, SAMPLED_DOCUMENTS)
        for part in parts[:: max(len(parts) // SAMPLED_PARTS, 1)][:SAMPLED_PARTS]
    )
    language = detect(terms(text) for documents in sample for text in document_texts(documents))
    said = "words as they are written" if language == "none" else f"{language} stems without stop words"
    get_logger(section).info("BM25 compares %s", said)
    return language
