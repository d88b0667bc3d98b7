"""Random histories of a live index whose documents have terms."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from live_shards import DIM, EXACT, index, table, term_columns
from scalingnote.index.config import Family
from scalingnote.index.hybrid import Joining
from scalingnote.index.live import versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

VOCABULARY = 12
NEW, PROBES = vectors(300, DIM, seed=7), vectors(3, DIM, seed=9)
Document = tuple[np.ndarray, dict[int, float]]
# Of the last query no term is known: it is answered by its embedding.
TERMS = SparseRows(
    np.array([0, 3, 5, 6]),
    np.array([0, 4, 7, 2, 9, VOCABULARY + 5], np.int32),
    np.array([1, 2.5, 0.7, 1, 1.3, 1], np.float32),
)
JOININGS = (
    Joining(),
    Joining(dense_weight=0.2, candidates=20),
    Joining(kind="reciprocal_rank", candidates=15),
)
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
    """Up to six terms, with impacts that float16 holds exactly and that hardly ever make a tie."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(VOCABULARY, rng.integers(0, 7), replace=False).tolist()
    return dict(zip(chosen, (rng.integers(1, 2000, len(chosen)) / 256).tolist(), strict=True))


def first_documents(count: int) -> dict[str, Document]:
    """Documents that an index is built of."""
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
    found, terms = table(list(written)), term_columns([terms for _, terms in written.values()])
    return pa.table([*found.columns, *terms.columns], schema=pa.schema([*found.schema, *terms.schema]))


def write(live: LiveIndex, written: dict[str, Document]) -> None:
    live.upsert(documents_of(written), np.stack([vector for vector, _ in written.values()]))


def play(
    history: Sequence[tuple[str, list[int]]], live: LiveIndex, truth: dict[str, Document], **reopened: Any
) -> tuple[LiveIndex, dict[str, Document]]:
    """The index after a history, and its documents; `reopened`: options of an index that is opened again."""
    drawn: Iterator[tuple[int, np.ndarray]] = iter(enumerate(NEW))
    for kind, numbers in history:
        names = [f"d{number}" for number in dict.fromkeys(numbers)]
        match kind:
            case "upsert":
                seeds = [next(drawn) for _ in names]
                written = {n: (v, some_terms(900 + i)) for n, (i, v) in zip(names, seeds, strict=True)}
                write(live, written)
                truth = truth | written
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
    """Results, scores, documents and vectors are those of an index of the final documents, built anew."""
    for name in ("d7", "d49", "d80", "n3", "nothing"):
        vector, wanted = found.vector(name), expected.vector(name)
        assert found.get(name) == expected.get(name)
        assert (vector is None, wanted is None) == (name not in truth, name not in truth)
        assert vector is None or np.allclose(vector, wanted, atol=1e-6)
    for where in (None, {"topic": [f"topic 0 of d{i}" for i in range(0, 90, 3)]}):
        for k in (1, 9, 200):
            for hits, wanted in zip(
                *(s.search(PROBES, k=k, where=where) for s in (found, expected)), strict=True
            ):
                assert [hit.document for hit in hits] == [hit.document for hit in wanted]
                assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in wanted], abs=1e-6)
        for joining in JOININGS:
            knobs: dict[str, Any] = {"k": 9, "joining": joining, "where": where}
            for hits, wanted in zip(
                *(s.search(PROBES, TERMS, **knobs) for s in (found, expected)), strict=True
            ):
                np.testing.assert_allclose([h.score for h in hits], [w.score for w in wanted], atol=1e-6)
                if joining.kind == "interpolation":  # sums of ranks hang on how ties were ranked
                    # Rows are numbered otherwise: of equal scores another may come first, or be the last.
                    last = wanted[-1].score + 1e-6 if wanted else 0
                    above = {w.doc_id for w in wanted if w.score > last}
                    assert {h.doc_id for h in hits if h.score > last} == above
