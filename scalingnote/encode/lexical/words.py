"""The words of a corpus: their language, and the number of texts that each occurs in.

    texts ─count─► words by bucket ─merge─► the frequent words of a bucket ─choose─► the most frequent of all

A task holds the words of one slice, of one bucket, or the words that are kept: its memory does not grow with
the corpus. The driver holds totals. Finished tasks are recorded: a run after a kill repeats only the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.bm25 import document_texts, terms
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Executor
from scalingnote.core.words import Language, detect
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact, read_table, write_table
from scalingnote.storage.schema import TEXT_COLUMNS
from scalingnote.storage.shuffle import JsonRecord, NumberedSlice, run_slices

WORDS = pa.schema({"word": pa.string(), "documents": pa.int64()})  # documents: texts that have the word
TEXTS_PER_BUCKET = 1 << 21  # the words of this number of texts are one bucket
SAMPLED_PARTS = 8  # parts of the documents, at equal distances
SAMPLED_DOCUMENTS = 256  # first documents of each of these parts
WordReader = Callable[[Sequence[str]], Iterable[Sequence[str]]]


def language_of(dataset: Artifact, chosen: Language | Literal["auto"] = "auto", *, section: str) -> Language:
    """Return the configured language, or, if that is "auto", the one that :func:`detect` finds in a sample.

    Args:
        dataset: its sample, and so the language, is always the same.
        chosen: language in the config.
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
    form = "words as they are written" if language == "none" else f"{language} stems without stop words"
    get_logger(section).info("BM25 compares %s", form)
    return language


@dataclass(frozen=True)
class Frequencies:
    """Totals of a corpus, and the file of its most frequent words."""

    texts: int
    length: int  # number of words in all texts
    distinct: int  # number of different words
    frequent: int  # number of words in enough texts
    words: str  # URI of a table WORDS, by falling frequency, then in alphabetical order


def count_frequencies(
    slices: Sequence[list[str]],
    read: WordReader,
    *,
    texts: int,
    most: int,
    least: int = 1,
    folder: str,
    each: Executor,
    section: str,
) -> Frequencies:
    """Count the texts with each word.

    Args:
        slices: parts of the corpus, one list per task.
        read: returns the words of each text in some parts.
        texts: approximate number of texts.
        most: maximum number of words to keep, the most frequent ones, if equal in alphabetical order.
        least: minimum number of texts with a word that is kept.
        folder: work directory.
        each: runs the tasks.
        section: name of the logger.
    """
    buckets = max(-(-texts // TEXTS_PER_BUCKET), 1)
    do = partial(run_slices, folder=folder, each=each, section=section)
    count_records = do("count", partial(_count, read=read, folder=folder, buckets=buckets), slices)
    merge = partial(_merge, folder=folder, most=most, least=least)
    merge_records = do("merge", merge, range(buckets), unit="buckets")
    words = fs.join(folder, "words.parquet")
    do("choose", partial(_choose, folder=folder, most=most, output=words), [buckets], unit="tables")
    totals = {name: sum(record[name] for record in count_records) for name in ("texts", "length")}
    totals |= {name: sum(record[name] for record in merge_records) for name in ("distinct", "frequent")}
    return Frequencies(**totals, words=words)


def count_words(texts: Iterable[Sequence[str]]) -> tuple[pa.Table, dict[str, int]]:
    """Count WORDS of texts, in alphabetical order, the number of `texts`, and their `length` in words."""
    counts: Counter[str] = Counter()
    number = length = 0
    for words in texts:
        counts.update(set(words))
        number, length = number + 1, length + len(words)
    names = sorted(counts)
    table = pa.table([names, [counts[name] for name in names]], schema=WORDS)
    return table, {"texts": number, "length": length}


def add_counts(counts: pa.Table) -> pa.Table:
    """Sum the rows of each word in a table WORDS to one row."""
    summed = counts.group_by("word", use_threads=False).aggregate([("documents", "sum")])
    return summed.rename_columns({"documents_sum": "documents"}).select(WORDS.names)


def most_frequent(words: pa.Table, most: int) -> pa.Table:
    """Select at most `most` words by falling frequency, equally frequent ones in alphabetical order."""
    return words.sort_by([("documents", "descending"), ("word", "ascending")]).slice(0, most)


def _count(item: NumberedSlice, *, read: WordReader, folder: str, buckets: int) -> JsonRecord:
    table, totals = count_words(read(item[1]))
    if len(table):
        bucket = shuffle.bucket_of(table["word"], buckets)
        shuffle.scatter(table, bucket, target=fs.join(folder, "counted"), name=f"{item[0]:05d}")
    return totals


def _merge(item: tuple[int, int], *, folder: str, most: int, least: int) -> JsonRecord:
    bucket = item[1]
    words = add_counts(shuffle.gather(fs.join(folder, "counted"), bucket, schema=WORDS))
    frequent = words.filter(pc.greater_equal(words["documents"], least))
    write_table(_merged_file(folder, bucket), most_frequent(frequent, most))
    return {"distinct": len(words), "frequent": len(frequent)}


def _choose(item: tuple[int, int], *, folder: str, most: int, output: str) -> int:
    best = WORDS.empty_table()
    for bucket in range(item[1]):
        best = most_frequent(pa.concat_tables([best, read_table(_merged_file(folder, bucket))]), most)
    write_table(output, best)
    return len(best)


def _merged_file(folder: str, bucket: int) -> str:
    return fs.join(folder, "merged", f"{bucket:05d}.parquet")
