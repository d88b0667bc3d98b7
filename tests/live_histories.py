"""Random histories of a live index of documents with terms."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from live_shards import DIM, EXACT, index, table, term_columns
from scalingnote.index.config import Family
from scalingnote.index.live import versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

VOCABULARY = 12
NEW, PROBES = vectors(300, DIM, seed=7), vectors(3, DIM, seed=9)
Document = tuple[np.ndarray, dict[int, float]]
# The last query has no known term: only its embedding ranks.
TERMS = SparseRows(
    np.array([0, 3, 5, 6]),
    np.array([0, 4, 7, 2, 9, VOCABULARY + 5], np.int32),
    np.array([1, 2.5, 0.7, 1, 1.3, 1], np.float32),
)
DENSE_WEIGHTS = (None, 0.2)
HISTORIES = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["upsert", "delete"]), st.lists(st.integers(0, 85), min_size=1, max_size=12)
        ),
        st.tuples(st.sampled_from(["merge", "compact", "rollback", "reopen"]), st.just([])),
    ),
    min_size=1,
    max_size=8,
)


def some_terms(seed: int) -> dict[int, float]:
    """Draw up to six terms, with impacts that are exact in float16 and rarely tie."""
    rng = np.random.default_rng(seed)
    term_ids = rng.choice(VOCABULARY, rng.integers(0, 7), replace=False).tolist()
    return dict(zip(term_ids, (rng.integers(1, 2000, len(term_ids)) / 256).tolist(), strict=True))


def first_documents(count: int) -> dict[str, Document]:
    """Return the documents of which an index is built."""
    return {f"d{i}": (vector, some_terms(i)) for i, vector in enumerate(vectors(count, DIM))}


def built_of(
    uri: str,
    documents: dict[str, Document],
    *,
    shards: int,
    family: Family = EXACT,
    strongest: int | None = None,
) -> Artifact:
    names = np.array_split(np.array(list(documents), object), shards)
    return index(
        uri,
        [{name: documents[name][0] for name in part} for part in names],
        family,
        terms={name: terms for name, (_, terms) in documents.items()},
        strongest=strongest,
    )


def documents_of(written: dict[str, Document]) -> pa.Table:
    rows, terms = table(list(written)), term_columns([terms for _, terms in written.values()])
    return pa.table([*rows.columns, *terms.columns], schema=pa.schema([*rows.schema, *terms.schema]))


def write(live: LiveIndex, written: dict[str, Document]) -> None:
    live.upsert(documents_of(written), np.stack([vector for vector, _ in written.values()]))


def play(
    history: Sequence[tuple[str, list[int]]], live: LiveIndex, truth: dict[str, Document], **reopened: Any
) -> tuple[LiveIndex, dict[str, Document]]:
    """Run a history; return the index and its documents. `reopened`: options of an index that is reopened."""
    new_vectors: Iterator[tuple[int, np.ndarray]] = iter(enumerate(NEW))
    for kind, numbers in history:
        names = [f"d{number}" for number in dict.fromkeys(numbers)]
        match kind:
            case "upsert":
                seeds = [next(new_vectors) for _ in names]
                documents = {n: (v, some_terms(900 + i)) for n, (i, v) in zip(names, seeds, strict=True)}
                write(live, documents)
                truth = truth | documents
            case "delete":
                live.delete(names)
                truth = {name: document for name, document in truth.items() if name not in names}
            case "merge":
                live.shards[0].merge()
            case "compact":
                live.compact()
            case "rollback":
                versions.activate(live.folder, versions.listing(live.folder)[0].number)
                live.adopt()
            case "reopen":
                live.close()
                live = LiveIndex(Path(live.folder), **reopened)
    return live, truth


def agree(found: Searcher, expected: Searcher, truth: dict[str, Document]) -> None:
    """Check that results, scores, documents and vectors equal those of a new index of the final documents."""
    for name in ("d7", "d49", "d80", "n3", "nothing"):
        vector, expected_vector = found.vector(name), expected.vector(name)
        assert found.get(name) == expected.get(name)
        assert (vector is None, expected_vector is None) == (name not in truth, name not in truth)
        assert vector is None or np.allclose(vector, expected_vector, atol=1e-6)
    for where in (None, {"topic": [f"topic 0 of d{i}" for i in range(0, 90, 3)]}):
        for k in (1, 9, 200):
            for hits, expected_hits in zip(
                *(s.search(PROBES, k=k, where=where) for s in (found, expected)), strict=True
            ):
                assert [hit.document for hit in hits] == [hit.document for hit in expected_hits]
                assert [hit.score for hit in hits] == pytest.approx(
                    [hit.score for hit in expected_hits], abs=1e-6
                )
        for dense_weight in DENSE_WEIGHTS:
            knobs: dict[str, Any] = {"k": 9, "dense_weight": dense_weight, "where": where}
            for hits, expected_hits in zip(
                *(s.search(PROBES, TERMS, **knobs) for s in (found, expected)), strict=True
            ):
                np.testing.assert_allclose(
                    [h.score for h in hits], [w.score for w in expected_hits], atol=1e-6
                )
                # Rows have other numbers: of equal scores, another one may be first or last.
                last = expected_hits[-1].score + 1e-6 if expected_hits else 0
                above = {w.doc_id for w in expected_hits if w.score > last}
                assert {h.doc_id for h in hits if h.score > last} == above
