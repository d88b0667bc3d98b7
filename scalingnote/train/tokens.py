"""Texts to token rows: tokenizers and prompts of the towers, and one slice of documents or of triplets.

A document is identified by a 64-bit hash of its doc_id until it has a row number. All rows of a query are in
one part of a triplets artifact (collect partitions by query, mine keeps the parts), so the documents known to
answer a query are found within a slice. Tables are streamed, never held entirely in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, Int64, UInt64
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.core.errors import TrainingError
from scalingnote.models import backbone as backbones
from scalingnote.models import published_tower
from scalingnote.models.backbone import train_tokenizer
from scalingnote.models.config import LookupConfig, Scratch, TokenWiseConfig, TowerConfig
from scalingnote.models.lookup import LookupPrompt
from scalingnote.models.prompt import (
    DocumentPrompt,
    QueryPrompt,
    TokenRow,
    document_fields,
    list_column,
    token_columns,
)
from scalingnote.models.published_model import Role
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import tower_prompt
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import DOCUMENT_COLUMNS
from scalingnote.storage.shuffle import hash_of
from scalingnote.train.data import ABSENT, RowNumbers, one_chunk

MISSING_ROW, UNREADABLE_ROW = -1, -2  # in place of a row number
MAX_KNOWN_POSITIVES = 16  # per query, kept for masking; further ones are not masked
_BLOCK_ROWS = 8192

Named = UInt64[ndarray, " named"]  # sorted hashes of the doc_ids of all documents that triplets name
Places = Int64[ndarray, " named"]  # the row number of each of them, or MISSING_ROW or UNREADABLE_ROW
AnyTower = TowerConfig | LookupConfig | TokenWiseConfig
ArrowRows = TypeVar("ArrowRows", pa.Table, pa.RecordBatch)
# A tokenizer learns nothing new from the end of long documents, or from the second million of them.
_TOKENIZER_CHARS = 2000
_TOKENIZER_TEXTS = 1_000_000


def read_columns(
    artifact: Artifact, parts: Iterable[str], columns: list[str], *, prefix: str = ""
) -> Iterator[pa.RecordBatch]:
    """Yield columns of parts of an artifact, a few thousand rows at a time; `prefix` as in :func:`of_set`."""
    for part in parts:
        for batch in artifact.batches(part, columns=columns):
            yield of_set(batch, prefix)


def of_set(rows: ArrowRows, name: str) -> ArrowRows:
    """Prefix all ids of a mixture set's rows with its name and a slash: two sets may have equal ids."""
    if not name:
        return rows
    for column in ("doc_id", "query_id", "positive"):
        if column in rows.schema.names:
            rows = _replace(rows, column, pc.binary_join_element_wise(name, rows[column], "/"))
    if "negatives" in rows.schema.names:
        lists = rows["negatives"]
        array = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
        prefixed = pc.binary_join_element_wise(name, array.flatten(), "/")
        lengths: list[int] = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
        rows = _replace(rows, "negatives", list_column(prefixed, [0, *accumulate(lengths)]))
    return rows


def _replace(rows: ArrowRows, name: str, values: pa.Array | pa.ChunkedArray) -> ArrowRows:
    return rows.set_column(rows.schema.get_field_index(name), name, values)


def in_sorted(hashes: UInt64[ndarray, " hashes"], wanted: Named) -> Bool[ndarray, " hashes"]:
    """Mask the hashes that occur in `wanted`, which is sorted."""
    if not len(wanted):
        return np.zeros(len(hashes), dtype=bool)
    place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
    return np.asarray(wanted[place] == hashes)


def train_tokenizers(towers: dict[str, AnyTower], *, texts: Callable[[], Iterable[str]]) -> dict[str, str]:
    """Train tokenizers for the towers that start from scratch; return their JSON by tower.

    Towers of one vocabulary size share a tokenizer. `texts` is called once per vocabulary size, so that a
    stream can be read again.
    """
    sizes = {name: size for name, tower in towers.items() if (size := learnt_vocabulary(tower)) is not None}
    by_size = {size: train_tokenizer(texts(), vocabulary=size) for size in sorted(set(sizes.values()))}
    return {name: by_size[size] for name, size in sizes.items()}


def tokenizer_texts(
    triplets: Artifact, dataset: Artifact, doc_hashes: Named, *, prefix: str = ""
) -> Iterator[str]:
    """Yield texts for the training of a tokenizer: each query once, then all fields of the documents.

    `doc_hashes` are sorted hashes of the doc_ids behind `prefix`, as in :func:`of_set`; if there are too
    many, the smallest ones are a fair sample.
    """
    yield from distinct_queries(triplets, "triplets")
    sampled = doc_hashes[:_TOKENIZER_TEXTS]
    parts = dataset.table_parts("documents")
    for batch in read_columns(dataset, parts, DOCUMENT_COLUMNS, prefix=prefix):
        rows = batch.filter(pa.array(in_sorted(hash_of(batch["doc_id"]), sampled)))
        for texts in document_fields(rows):
            yield from (text[:_TOKENIZER_CHARS] for text in texts)


def distinct_queries(artifact: Artifact, table: str) -> Iterator[str]:
    """Yield the queries of a table, each once, at most the first million."""
    seen: set[str] = set()
    for batch in artifact.batches(table, columns=["query"]):
        for query in pc.unique(batch["query"]).to_pylist():
            if query not in seen:
                seen.add(query)
                yield query
                if len(seen) == _TOKENIZER_TEXTS:
                    return


def learnt_vocabulary(config: AnyTower) -> int | None:
    """Return the vocabulary size that a tower's tokenizer learns; None if the checkpoint has a tokenizer."""
    if isinstance(config, LookupConfig):
        return config.vocabulary
    return config.backbone.vocabulary if isinstance(config.backbone, Scratch) else None


def build_prompt(
    config: AnyTower, *, role: Role, tokenizer_json: str | None, sparse: bool = False
) -> QueryPrompt | DocumentPrompt | LookupPrompt:
    """Build the prompt by which a tower of this config reads a text, without drawing or loading weights.

    `tokenizer_json` is that of a tower from scratch; `sparse`: the tower has a sparse head.

    Raises:
        ConfigError: the same as for the tower.
    """
    if isinstance(config, LookupConfig):
        assert tokenizer_json is not None
        return LookupPrompt(Tokenizer.from_str(tokenizer_json), max_length=config.max_length)
    if isinstance(config, TowerConfig) and config.pooling != "placeholders":
        return published_tower.prompt_of(config, role=role)
    with torch.device("meta"):
        if isinstance(config.backbone, Scratch):
            shell = backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=0)
        else:
            assert config.backbone is not None, "a tower without its own backbone reads as another does"
            shell = backbones.shell(config.backbone.path)
            backbones.read_as(shell, config.backbone)
        plain = config.model_copy(update={"lora": None})  # it changes no prompt
        if isinstance(plain, TokenWiseConfig):
            return TokenWise(shell, plain, dim=1).prompt
        return tower_prompt(shell, plain, role=role, spans=sparse)


def prompt_blocks(prompt: QueryPrompt | LookupPrompt, queries: Sequence[str]) -> Iterator[list[TokenRow]]:
    """Yield token rows of queries in blocks of some thousands."""
    for start in range(0, len(queries), _BLOCK_ROWS):
        yield prompt.rows(queries[start : start + _BLOCK_ROWS])


def document_hashes(batches: Iterable[pa.RecordBatch]) -> tuple[Named, int]:
    """Return sorted hashes of the doc_ids that triplets name, and the most documents of a row."""
    hashes, group = [np.empty(0, np.uint64)], 1
    for batch in batches:
        ids = pa.concat_arrays([batch["positive"], pc.list_flatten(batch["negatives"])])
        hashes.append(np.unique(hash_of(ids)))
        group = max(group, 1 + (pc.max(pc.list_value_length(batch["negatives"])).as_py() or 0))
    return np.unique(np.concatenate(hashes)), group


def document_rows(
    batches: Iterable[pa.RecordBatch], *, prompt: DocumentPrompt, wanted: Named
) -> tuple[pa.Table, dict[str, str]]:
    """Build token rows of the documents with hashes in `wanted`, which is sorted.

    Columns: ``hash``, ``ids``, ``positions``; in the order of the documents. Unreadable documents are
    returned as doc_id -> reason.
    """
    hashes = [np.empty(0, np.uint64)]
    problems: dict[str, str] = {}

    def blocks() -> Iterator[list[TokenRow]]:
        for batch in batches:
            batch_hashes = hash_of(batch["doc_id"])
            is_wanted = in_sorted(batch_hashes, wanted)
            texts = batch.filter(pa.array(is_wanted))
            rows = prompt.rows(*document_fields(texts))
            readable = np.array([isinstance(row, TokenRow) for row in rows], dtype=bool)
            for at in np.flatnonzero(~readable).tolist():
                problems[texts["doc_id"][at].as_py()] = str(rows[at])
            hashes.append(batch_hashes[is_wanted][readable])
            yield [row for row in rows if isinstance(row, TokenRow)]

    columns = token_columns(blocks(), views=prompt.width)
    return one_chunk({"hash": pa.array(np.concatenate(hashes)), **columns}), problems


def triplet_rows(
    triplets: pa.Table,
    answers: pa.Table | None,
    *,
    prompt: QueryPrompt | LookupPrompt,
    group: int,
    wanted: Named,
    place: Places,
    sparse: SparseQuery | None = None,
) -> tuple[pa.Table, int]:
    """Build rows of triplets that training can read; count those left out for an unreadable positive.

    Columns of a row: ``ids`` and ``positions`` of its query, ``terms`` of the `sparse` one, and those of
    :func:`triplet_columns`.
    """
    columns, readable = triplet_columns(triplets, answers, group=group, wanted=wanted, place=place)
    texts = pc.dictionary_encode(triplets["query"].combine_chunks())
    distinct = texts.dictionary.to_pylist()
    tokens = token_columns(prompt_blocks(prompt, distinct), views=len(prompt.views))
    if sparse is not None:
        terms = sparse.tokens(distinct)
        flat = np.array([term for row in terms for term in row], dtype=np.int32)
        tokens["terms"] = list_column(flat, [0, *accumulate(map(len, terms))])
    table = one_chunk({**{name: column.take(texts.indices) for name, column in tokens.items()}, **columns})
    return table.filter(pa.array(readable)).combine_chunks(), int((~readable).sum())


def triplet_columns(
    triplets: pa.Table, answers: pa.Table | None, *, group: int, wanted: Named, place: Places
) -> tuple[dict[str, pa.Array], Bool[ndarray, " rows"]]:
    """Build all columns of triplets except the texts, and a mask of rows with a readable positive.

    `place` holds a row number for each of the `wanted` hashes, or MISSING_ROW or UNREADABLE_ROW. Columns of a
    row: ``query`` (see :func:`query_number`), ``documents`` (`group` row numbers, the positive first; ABSENT
    if the row has fewer, or one cannot be read), ``known`` (row numbers of documents known to answer the
    query), ``weight``, ``scores`` (NaN if there are none), and ``split`` and ``part`` (source/hop), by which
    rows are divided into tables.

    Raises:
        TrainingError: triplets name a document without a row number, or have a wrong number of scores.
    """
    ids = pa.chunked_array(
        [*triplets["positive"].chunks, *pc.list_flatten(triplets["negatives"]).chunks], pa.string()
    )
    hashes = hash_of(ids)
    rows = row_numbers(hashes, wanted, place)
    if (rows == MISSING_ROW).any():
        missing = ids[int(np.flatnonzero(rows == MISSING_ROW)[0])].as_py()
        raise TrainingError(
            f"triplets name document {missing!r}, which is not in the dataset: re-run collect"
        )
    size = len(triplets)
    documents = np.full((size, group), ABSENT, dtype=np.int64)
    documents[:, 0] = rows[:size]
    documents[_places(_lengths(triplets["negatives"]), first=1)] = rows[size:]
    documents[documents < 0] = ABSENT
    coded = pc.dictionary_encode(triplets["query_id"].combine_chunks())
    columns = {
        "query": pa.array(query_number(coded.dictionary)).take(coded.indices),
        "documents": arrow.to_arrow(documents),
        "known": _known_answers(coded, documents[:, 0], answers, wanted, place).take(coded.indices),
        "weight": triplets["weight"].combine_chunks().cast(pa.float32()),
        "scores": _scores(triplets, group),
        "split": triplets["split"].combine_chunks(),
        "part": pc.binary_join_element_wise(triplets["source"], triplets["hop"], "/").combine_chunks(),
    }
    readable: ndarray = np.asarray(documents[:, 0] != ABSENT)
    return columns, readable


def read_answers(triplets: Artifact, parts: Sequence[str]) -> pa.Table | None:
    """Read documents known to answer the queries of parts of triplets; None if the artifact has none."""
    names = [name.replace("triplets/", "answers/", 1) for name in parts]
    answers = [triplets.table(name) for name in names if name in triplets.names("answers/")]
    return pa.concat_tables(answers) if answers else None


def row_facts(rows: pa.Table) -> dict[str, Any]:
    """Return counts for the facts of a store.

    ``short``: rows with fewer documents than others; ``known``: most known answers of a query; ``scored``:
    whether any row has scores.
    """
    documents = rows["documents"].combine_chunks()
    group = documents.type.list_size
    return {
        "short": int((documents.flatten().to_numpy().reshape(-1, group) == ABSENT).any(axis=1).sum()),
        "known": pc.max(pc.list_value_length(rows["known"])).as_py() or 0,
        "scored": not bool(pc.all(pc.is_nan(pc.list_flatten(rows["scores"]))).as_py()),
    }


def query_number(query_ids: pa.Array | pa.ChunkedArray) -> Int64[ndarray, " rows"]:
    """Return the number of each query in training: 63 bits of a hash of its id."""
    numbers: ndarray = (hash_of(query_ids) >> np.uint64(1)).astype(np.int64)
    return numbers


def row_numbers(
    hashes: UInt64[ndarray, " hashes"], wanted: Named, place: Places
) -> Int64[ndarray, " hashes"]:
    """Look up row numbers of documents by the hashes of their ids; MISSING_ROW if not in `wanted`."""
    is_known = in_sorted(hashes, wanted)
    rows = np.full(len(hashes), MISSING_ROW, dtype=np.int64)
    rows[is_known] = place[np.searchsorted(wanted, hashes[is_known])]
    return rows


def _lengths(lists: pa.ChunkedArray) -> Int64[ndarray, " rows"]:
    """Return the length of each list, 0 for a null."""
    return np.asarray(pc.fill_null(pc.list_value_length(lists), 0), dtype=np.int64)


def _places(lengths: Int64[ndarray, " rows"], *, first: int = 0) -> tuple[ndarray, ndarray]:
    """Return row and column, in a table, of each value of the lists; rows begin at column `first`."""
    starts = np.cumsum(lengths) - lengths
    column = np.arange(int(lengths.sum())) - np.repeat(starts, lengths) + first
    return np.repeat(np.arange(len(lengths)), lengths), column


def _scores(triplets: pa.Table, group: int) -> pa.Array:
    """Return a ranking model's scores of each row's documents; NaN for rows without a score for every one."""
    out = np.full((len(triplets), group), np.nan, dtype=np.float32)
    if "scores" in triplets.column_names:
        lengths, documents = _lengths(triplets["scores"]), 1 + _lengths(triplets["negatives"])
        wrong = np.flatnonzero(np.asarray(pc.is_valid(triplets["scores"])) & (lengths != documents))
        if len(wrong):
            raise TrainingError(
                f"a triplet has {lengths[wrong[0]]} scores for {documents[wrong[0]]} documents: re-run "
                "collect"
            )
        places = _places(lengths)
        out[places] = pc.fill_null(pc.list_flatten(triplets["scores"]), np.nan).to_numpy()
        out[np.unique(places[0][np.isnan(out[places])])] = np.nan
    return arrow.to_arrow(out)


def _known_answers(
    queries: pa.DictionaryArray, positives: RowNumbers, answers: pa.Table | None, wanted: Named, place: Places
) -> pa.Array:
    """List the documents known to answer each distinct query: its positives first, then `answers`."""
    codes, documents = [queries.indices.to_numpy().astype(np.int64)], [positives]
    if answers is not None:
        code = pc.index_in(answers["query_id"], value_set=queries.dictionary)
        answers = answers.append_column("code", code).filter(pc.is_valid(code))
        codes.append(answers["code"].to_numpy().astype(np.int64))
        documents.append(row_numbers(hash_of(answers["positive"]), wanted, place))
    code, document = np.concatenate(codes), np.concatenate(documents)
    code, document = code[document >= 0], document[document >= 0]
    _, first = np.unique(code * (len(place) + 1) + document, return_index=True)
    first = np.sort(first)  # each pair once, at its first occurrence
    first = first[np.argsort(code[first], kind="stable")]
    code, document = code[first], document[first]
    starts = np.searchsorted(code, code)
    in_limit = np.arange(len(code)) - starts < MAX_KNOWN_POSITIVES
    lengths = np.bincount(code[in_limit], minlength=len(queries.dictionary))
    return list_column(document[in_limit], [0, *accumulate(lengths.tolist())])
