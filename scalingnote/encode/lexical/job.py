"""The bm25 stage: sparse vectors of documents, and the encoder of queries for them.

    documents ─sample─► language
        ├─────── count ───► document frequencies ─► vocabulary of the most frequent words
        └───────────────── weight ───────────────────────────────► terms and impacts, part by part

Tasks read slices of documents: memory is bounded by a slice and by the vocabulary, at any corpus size. Texts
are split into words twice, so that words are not stored between the passes.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from scalingnote.core import cluster
from scalingnote.core.bm25 import document_texts, terms
from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.core.words import Language
from scalingnote.encode.config import BM25Config
from scalingnote.encode.lexical.weights import COLLECTION, VOCABULARY, BM25Weights
from scalingnote.encode.lexical.words import count_frequencies, language_of
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import (
    Artifact,
    Draft,
    open_artifact,
    read_table,
    write_file,
    write_table,
)
from scalingnote.storage.schema import DOCUMENT_COLUMNS, TEXT_COLUMNS
from scalingnote.storage.shuffle import JsonRecord, NumberedSlice, named_parts, run_slices, slices

log = get_logger("bm25")
MAX_VOCABULARY = 1_000_000  # most frequent words: each takes 100 bytes in every query encoder
MAX_QUERY_TERMS = 512  # of a query; later ones are ignored


def run(config: BM25Config, *, dataset: str, output: str) -> Artifact:
    """Build the artifact `bm25_terms` of a dataset.

    Its table `terms` has the parts, documents and order of the dataset's documents: doc_id, terms, impacts.
    :class:`SparseQuery` reads ``sparse_query/``.

    Args:
        config: BM25's constants, and the language.
        dataset: URI of the dataset.
        output: URI of the artifact.

    Raises:
        DataError: no document has a word.
    """
    source = open_artifact(dataset, kind="dataset")
    draft = Draft(output, kind="bm25_terms", config=config, parents={"dataset": source})
    if draft.finished:
        return draft.existing()
    work = slices(source, "documents")
    language = language_of(source, config.language, section="bm25")
    frequencies = count_frequencies(
        work,
        partial(read_words, dataset=source, language=language),
        texts=source.counts["documents"],
        most=MAX_VOCABULARY,
        folder=draft.work(),
        each=cluster.map_tasks,
        section="bm25",
    )
    if not frequencies.length:
        raise DataError(f"{source.uri}: none of {frequencies.texts:,} documents has a word to index")
    do = partial(run_slices, folder=draft.work(), each=cluster.map_tasks, section="bm25", unit="tasks")
    write = partial(_write_vocabulary, config=config, language=language, output=draft.uri)
    (vocabulary,) = do("vocabulary", write, [frequencies.words])
    collection = {"documents": frequencies.texts, "length": frequencies.length, "language": language}
    draft.write_json(COLLECTION, collection)
    weigh = partial(weigh_documents, dataset=source, config=config, output=draft.uri, collection=collection)
    records = do("weight", weigh, work)
    for record in [vocabulary, *records]:
        for name, part in named_parts(record["files"]):
            draft.register(name, part)
    counts = {
        "documents": frequencies.texts,
        "words": frequencies.distinct,
        "vocabulary": vocabulary["words"],
        "entries": sum(record["entries"] for record in records),
    }
    log.info(
        "%s documents of %.1f words; %s different words, %s kept",
        f"{counts['documents']:,}",
        frequencies.length / frequencies.texts,
        f"{counts['words']:,}",
        f"{counts['vocabulary']:,}",
    )
    return draft.commit(counts=counts, language=language)


def read_words(parts: Sequence[str], *, dataset: Artifact, language: Language) -> Iterator[list[str]]:
    """Yield the words of each document of some parts."""
    for part in parts:
        for text in document_texts(dataset.table(part, TEXT_COLUMNS)):
            yield terms(text, language)


def _write_vocabulary(
    item: tuple[int, str], *, config: BM25Config, language: Language, output: str
) -> JsonRecord:
    """Write the vocabulary and the query encoder for it."""
    words = read_table(item[1])
    files = [(VOCABULARY, vars(write_table(fs.join(output, VOCABULARY), words)))]
    vocabulary = {word: number for number, word in enumerate(words["word"].to_pylist())}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    query = SparseQuery(
        tokenizer,
        max_length=MAX_QUERY_TERMS,
        weighting="counts",
        analysis="words",
        language=language,
    )
    with tempfile.TemporaryDirectory() as local:
        query.save(Path(local))
        for path in sorted(Path(local).iterdir()):
            name = f"sparse_query/{path.name}"  # the same as in a dual encoder with a sparse head
            files.append((name, vars(write_file(fs.join(output, name), path.read_bytes()))))
    return {"files": files, "words": len(words)}


def weigh_documents(
    item: NumberedSlice, *, dataset: Artifact, config: BM25Config, output: str, collection: dict[str, Any]
) -> JsonRecord:
    """Write the terms and impacts of a slice, one part for each part of the documents."""
    words = read_table(fs.join(output, VOCABULARY))
    weights = BM25Weights(words, **collection, k1=config.k1, b=config.b)
    files, entries = [], 0
    for part in item[1]:
        documents = dataset.table(part, DOCUMENT_COLUMNS)
        table = weights.columns(document_texts(documents)).add_column(0, "doc_id", documents["doc_id"])
        name = "terms/" + part.removeprefix("documents/")
        files.append((name, vars(write_table(fs.join(output, name), table))))
        entries += sum(len(chunk.values) for chunk in table["terms"].chunks)
    return {"files": files, "entries": entries}
