"""The bm25 stage: sparse vectors of documents, and what encodes queries for them.

    documents ─count─► words by bucket ─merge─► document frequencies ─► vocabulary of the most frequent words
        └──────────────────────── weight ──────────────────────────────────► terms and impacts, part by part

Tasks read slices of documents and shuffle through files: memory is bounded by a slice, by a bucket of words
and by the vocabulary, at any corpus size. Texts are split into words twice, so that words are not stored
between the passes.
"""

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from scalingnote import cluster
from scalingnote.bm25 import document_texts, terms
from scalingnote.errors import DataError
from scalingnote.lexical.config import BM25Config
from scalingnote.lexical.weights import COLLECTION, VOCABULARY, WORDS, BM25Weights
from scalingnote.log import get_logger
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, write_file, write_table
from scalingnote.storage.shuffle import JsonRecord, NumberedSlice, named_parts, run_slices, slices

log = get_logger("bm25")
QUERY_SIDE = "sparse_query"  # same name as in a dual encoder with a sparse head
MAX_BUCKET_DOCUMENTS = 1 << 21  # whose words make one bucket
TEXTS = ["title", "topic", "content"]
_ORDER = [("documents", "descending"), ("word", "ascending")]


def run(config: BM25Config, *, dataset: str, output: str) -> Artifact:
    """Build the artifact `bm25_terms` of a dataset.

    Its table `terms` has the parts, documents and order of the dataset's documents: doc_id, terms, impacts.
    ``sparse_query/`` is what :class:`SparseQuery` reads.

    Args:
        config: BM25's constants and the size of the vocabulary.
        dataset: URI of the dataset.
        output: URI of the artifact.

    Raises:
        DataError: no document has a word.
    """
    source = open_artifact(dataset, kind="dataset")
    draft = Draft(output, kind="bm25_terms", config=config, parents={"dataset": source})
    if draft.finished:
        return draft.existing()
    folder = draft.work()
    work = slices(source, "documents")
    buckets = max(-(-source.counts["documents"] // MAX_BUCKET_DOCUMENTS), 1)
    do = partial(run_slices, folder=folder, each=cluster.map_tasks, room="bm25", unit="tasks")
    counted = do("count", partial(count_words, dataset=source, folder=folder, buckets=buckets), work)
    collection = {name: sum(record[name] for record in counted) for name in ("documents", "length")}
    if not collection["length"]:
        raise DataError(f"{source.uri}: none of {collection['documents']:,} documents has a word to index")
    words = do("merge", partial(merge_words, config=config, folder=folder), range(buckets))
    (vocabulary,) = do(
        "vocabulary", partial(choose_vocabulary, config=config, folder=folder, output=draft.uri), [buckets]
    )
    draft.write_json(COLLECTION, collection)
    task = partial(weigh_documents, dataset=source, config=config, output=draft.uri, collection=collection)
    weighed = do("weight", task, work)
    for record in [vocabulary, *weighed]:
        for name, part in named_parts(record["files"]):
            draft.register(name, part)
    counts = {
        "documents": collection["documents"],
        "words": sum(words),
        "vocabulary": vocabulary["words"],
        "entries": sum(record["entries"] for record in weighed),
    }
    log.info(
        "%s documents of %.1f words; %s different words, %s kept",
        *(f"{counts['documents']:,}", collection["length"] / counts["documents"]),
        *(f"{counts[name]:,}" for name in ("words", "vocabulary")),
    )
    return draft.commit(counts=counts)


def count_words(item: NumberedSlice, *, dataset: Artifact, folder: str, buckets: int) -> JsonRecord:
    """Scatter the document frequencies of a slice; returns its `documents` and their `length` in words."""
    number, parts = item
    frequencies: Counter[str] = Counter()
    documents = length = 0
    for part in parts:
        for text in document_texts(dataset.table(part, TEXTS)):
            words = terms(text)
            frequencies.update(set(words))
            documents, length = documents + 1, length + len(words)
    words = sorted(frequencies)
    table = pa.table([words, [frequencies[word] for word in words]], schema=WORDS)
    if words:
        bucket = shuffle.bucket_of(table["word"], buckets)
        shuffle.scatter(table, bucket, target=fs.join(folder, "counted"), name=f"{number:05d}")
    return {"documents": documents, "length": length}


def merge_words(item: tuple[int, int], *, config: BM25Config, folder: str) -> int:
    """Sum the document frequencies of a bucket, write its most frequent words, return the number of all."""
    bucket = item[1]
    table = shuffle.gather(fs.join(folder, "counted"), bucket, schema=WORDS)
    summed = table.group_by("word", use_threads=False).aggregate([("documents", "sum")])
    whole = summed.rename_columns({"documents_sum": "documents"}).select(WORDS.names)
    kept = _most_frequent(whole, config)
    write_table(fs.join(folder, "merged", f"{bucket:05d}.parquet"), kept)
    return len(whole)


def choose_vocabulary(item: tuple[int, int], *, config: BM25Config, folder: str, output: str) -> JsonRecord:
    """Write the vocabulary and the query side; words of equal frequency are in alphabetical order."""
    best = WORDS.empty_table()
    for bucket in range(item[1]):
        with fs.open_input(fs.join(folder, "merged", f"{bucket:05d}.parquet")) as stream:
            best = _most_frequent(pa.concat_tables([best, pq.read_table(stream)]), config)
    files = [(VOCABULARY, vars(write_table(fs.join(output, VOCABULARY), best)))]
    vocabulary = {word: number for number, word in enumerate(best["word"].to_pylist())}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    query = SparseQuery(tokenizer, max_length=config.query_terms, weighting="counts", analysis="words")
    with tempfile.TemporaryDirectory() as local:
        query.save(Path(local))
        for path in sorted(Path(local).iterdir()):
            name = f"{QUERY_SIDE}/{path.name}"
            files.append((name, vars(write_file(fs.join(output, name), path.read_bytes()))))
    return {"files": files, "words": len(best)}


def weigh_documents(
    item: NumberedSlice, *, dataset: Artifact, config: BM25Config, output: str, collection: dict[str, int]
) -> JsonRecord:
    """Write the terms and impacts of a slice, one part for each part of the documents."""
    with fs.open_input(fs.join(output, VOCABULARY)) as stream:
        words = pq.read_table(stream)
    weights = BM25Weights.of(words, **collection, k1=config.k1, b=config.b)
    files, entries = [], 0
    for part in item[1]:
        documents = dataset.table(part, ["doc_id", *TEXTS])
        table = weights.columns(document_texts(documents)).add_column(0, "doc_id", documents["doc_id"])
        name = "terms/" + part.removeprefix("documents/")
        files.append((name, vars(write_table(fs.join(output, name), table))))
        entries += sum(len(chunk.values) for chunk in table["terms"].chunks)
    return {"files": files, "entries": entries}


def _most_frequent(words: pa.Table, config: BM25Config) -> pa.Table:
    return words.sort_by(_ORDER).slice(0, config.max_vocabulary)
