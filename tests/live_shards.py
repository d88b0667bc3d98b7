"""Small shards and indexes for the tests of live updates, and a slow, simple reference search."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from scalingnote.index import families, ivf, postings
from scalingnote.index import shard as layouts
from scalingnote.index.config import IVFPQ, Family, IndexConfig
from scalingnote.index.live import versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.live_state import Snapshot
from scalingnote.index.live.versions import OpenVersion
from scalingnote.index.shard import SHARD_DOCUMENTS
from scalingnote.models.published_model import Similarity
from scalingnote.search import scan
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.schema import PASSAGE, SPARSE, document_of
from synthetic_corpus import vectors

DIM = 16
EVERY = 100_000  # candidates scored by their own vectors: codes decide nothing
NLIST = 6
EXACT = IVFPQ(m=4, nbits=4, refine="flat")


def quantizer(family: Family = EXACT) -> families.Quantizer:
    nlist = 1 if family.kind == "flat" else NLIST
    return families.train(vectors(300, DIM), family, nlist=nlist, seed=0)


def table(doc_ids: list[str], version: int = 0, *, passages: bool = False) -> pa.Table:
    texts = {name: [f"{name} {version} of {i}" for i in doc_ids] for name in SHARD_DOCUMENTS.names[1:]}
    rows = pa.table({"doc_id": doc_ids, **texts}, schema=SHARD_DOCUMENTS)
    if not passages:
        return rows
    numbers = [int(doc_id.rpartition("#")[2]) for doc_id in doc_ids]
    columns = [
        [document_of(i) for i in doc_ids],
        numbers,
        [10 * n for n in numbers],
        [9 + 10 * n for n in numbers],
    ]
    for field, values in zip(PASSAGE, columns, strict=True):
        rows = rows.append_column(field, pa.array(values, field.type))
    return rows


def term_columns(documents: list[Mapping[int, float]]) -> pa.Table:
    """Build the columns of terms and impacts of documents, as `encode` writes them."""
    rows = [dict(sorted(terms.items())) for terms in documents]
    impacts = [[np.float16(impact) for impact in row.values()] for row in rows]
    columns = zip(([list(row) for row in rows], impacts), SPARSE, strict=True)
    return pa.table([pa.array(values, field.type) for values, field in columns], schema=SPARSE)


def opened(index: Artifact) -> OpenVersion:
    """Open an index as the first version of a live one."""
    return OpenVersion(versions.version_of(0, index))


def search(snapshot: Snapshot, queries: np.ndarray, *, k: int) -> list[list[str]]:
    """Search all lists; return the doc_ids, best first."""
    return [
        snapshot.documents(row[row >= 0])["doc_id"].to_pylist() for row in scored(snapshot, queries, k=k)[1]
    ]


def scored(snapshot: Snapshot, queries: np.ndarray, *, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Search all lists; return scores and rows."""
    lists, masks = [s.lists for s in snapshot.segments], [s.alive for s in snapshot.segments]
    return scan.search(lists, queries, k=k, nprobe=NLIST, refine_factor=EVERY, masks=masks)


def brute_force(documents: Mapping[str, np.ndarray], queries: np.ndarray, *, k: int) -> list[list[str]]:
    """Search a dictionary of vectors; return the doc_ids, best first. Random vectors do not tie."""
    names = np.array(list(documents), object)
    if not len(names):
        return [[] for _ in queries]
    matrix = np.stack([v / np.linalg.norm(v) for v in documents.values()]).astype(np.float64)
    return [names[np.argsort(-(matrix @ query))[:k]].tolist() for query in queries]


def index(
    uri: str,
    shards: list[Mapping[str, np.ndarray]],
    family: Family = EXACT,
    *,
    terms: Mapping[str, Mapping[int, float]] | None = None,
    strongest: int | None = None,
    passages: bool = False,
    similarity: Similarity = "cosine",
) -> Artifact:
    """Build an index artifact as the index stage does; with `passages`, ids are those of passages."""
    shared = quantizer(family)
    config = IndexConfig(shards=len(shards), family=family, terms=strongest)
    draft = Draft(uri, kind="index", config=config, parents={})
    draft.write_bytes(layouts.COARSE, shared.coarse)
    refine = families.refine_of(family)
    documents = sum(map(len, shards))
    layout = layouts.IndexLayout(
        dim=DIM,
        documents=documents,
        shards=len(shards),
        family=family.kind,
        refine=refine,
        nlist=len(shared.centroids),
        nprobe=NLIST,
        refine_factor=EVERY if refine == "flat" else 4,
        recall=None,
        filters=("topic",),
        sparse=terms is not None,
        background=0.05,
        passages=passages,
        similarity=similarity,
    )
    for number, shard_vectors in enumerate(shards):
        columns = term_columns([terms[name] for name in shard_vectors] if terms else [])
        lists = ivf.empty(shared)
        ivf.add(lists, np.array([*shard_vectors.values()], np.float32).reshape(-1, DIM))
        shard_parts = layouts.write_shard(
            draft.uri,
            number,
            layout=layout,
            lists=lists,
            documents=table(list(shard_vectors), passages=passages),
            terms=postings.build(columns["terms"], columns["impacts"], strongest=strongest),
        )
        for name, part in shard_parts.items():
            draft.register(name, part)
    draft.write_json(layouts.LAYOUT_FILE, vars(layout))
    return draft.commit(counts={"documents": documents, "documents_not_embedded": 0})


def search_index(live: LiveIndex, queries: np.ndarray, *, k: int) -> list[list[str]]:
    """Search all lists of all shards; return the doc_ids, best first."""
    parts = [segment for snapshot in live.snapshots() for segment in snapshot.segments]
    segments, masks = [s.lists for s in parts], [s.alive for s in parts]
    _, rows_found = scan.search(segments, queries, k=k, nprobe=NLIST, refine_factor=EVERY, masks=masks)
    names = [name for segment in parts for name in segment.documents["doc_id"].to_pylist()]
    return [[names[row] for row in rows if row >= 0] for rows in rows_found.tolist()]
