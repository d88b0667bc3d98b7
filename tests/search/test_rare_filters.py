"""Filters that leave one document in ten thousand: k results come back, and they are those of brute force."""

import numpy as np
import pyarrow as pa
import pytest

from scalingnote import topk
from scalingnote.index import families, ivf
from scalingnote.index.config import Family, FastScan, RaBitQ, ScalarQuantized
from scalingnote.index.shard import DOCUMENTS, Layout, Shard
from scalingnote.search.searcher import Searcher
from synthetic_corpus import queries, vectors

COUNT, DIM, LISTS = 50_000, 8, 24
MATRIX = vectors(COUNT, DIM, clusters=60)
PRICES = np.random.default_rng(0).permutation(COUNT)
ASKED = queries(MATRIX, 6)


def _searcher(family: Family) -> Searcher:
    shared = families.train(MATRIX[::20], family, nlist=LISTS, iterations=2, seed=0)
    shards = []
    for number, rows in enumerate(np.array_split(np.arange(COUNT), 2)):
        lists = ivf.empty(shared)
        ivf.add(lists, MATRIX[rows])
        columns = {name: pa.array([""] * len(rows)) for name in DOCUMENTS.names}
        columns |= {"doc_id": pa.array(rows.astype(str)), "price": pa.array(PRICES[rows])}
        shards.append(Shard(number, lists, pa.table(columns)))
    refine = families.refine_of(family)
    layout = Layout(
        *(DIM, COUNT, len(shards), family.kind, refine, LISTS),
        nprobe=1,
        refine_factor=1,
        recall=None,
        filters=("price",),
    )
    return Searcher(layout, shards)


@pytest.mark.parametrize(
    "family",
    [FastScan(refine="flat"), FastScan(), RaBitQ(refine="none"), ScalarQuantized()],
    ids=lambda family: f"{family.kind}-{getattr(family, 'refine', '')}",
)
def test_rare_documents_are_found(family: Family) -> None:
    searcher = _searcher(family)
    for bound in (COUNT, 500, 50, 5):
        left = np.flatnonzero(bound > PRICES)
        for k in (3, 40):
            # One list, one candidate per result: what is missing, the search must see by itself.
            found = searcher.search(ASKED, k=k, where={"price": {"max": bound - 1}})
            rows = [[int(result.doc_id) for result in line] for line in found]
            assert [len({*line} & {*left.tolist()}) for line in rows] == [min(k, len(left))] * len(ASKED)
            if bound <= 50 and families.refine_of(family) == "flat":
                assert rows == left[topk.search(ASKED, MATRIX[left], k=k)[1]].tolist()
        if bound <= 50 and families.refine_of(family) == "sq8":
            best = left[topk.search(ASKED, MATRIX[left], k=1)[1][:, 0]]
            assert [line[0] for line in rows] == best.tolist()
