from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from in_process import run_without_ray
from scalingnote import topk
from scalingnote.errors import SearchError
from scalingnote.hybrid import Joining
from scalingnote.index import job
from scalingnote.index.config import FastScan, IndexConfig
from scalingnote.index.live_index import LiveIndex
from scalingnote.search.searcher import LiveSearcher, rank
from synthetic_corpus import Corpus, queries, vectors

EXACT = IndexConfig(
    shards=2, family=FastScan(refine="flat"), nlist=6, nprobe=6, iterations=3, refine_factor=200
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.build(f"{tmp_path_factory.mktemp('corpus')}", sizes=[150, 140], dim=16)


@pytest.fixture(scope="module")
def uri(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_without_ray(
        job.run, EXACT, **corpus.uris, output=f"{tmp_path_factory.mktemp('index')}/index"
    ).uri


def _documents(names: list[str], topic: str) -> pa.Table:
    filled = {name: [""] * len(names) for name in ("snippet", "semantic_id")}
    return pa.table({"doc_id": names, "title": names, "topic": [topic] * len(names), **filled})


def test_searches_see_what_was_written_deleted_merged_and_compacted(
    uri: str, corpus: Corpus, tmp_path: Path
) -> None:
    live = LiveIndex(tmp_path / "live", uri)
    searcher = LiveSearcher(live)
    truth = {f"d{row}": (vector, f"topic {row % 7}") for row, vector in enumerate(corpus.matrix)}
    asked = queries(corpus.matrix, 12)

    def agrees() -> None:
        names = np.array(list(truth))
        matrix = np.stack([vector for vector, _ in truth.values()])
        topics = np.array([topic for _, topic in truth.values()])
        for where, rows in (
            (None, np.arange(len(names))),
            ({"topic": ["topic 2", "new"]}, np.flatnonzero(np.isin(topics, ["topic 2", "new"]))),
        ):
            found = searcher.search(asked, k=8, where=where)
            scores, exact = topk.search(asked, matrix[rows], k=8)
            assert [[hit.document["doc_id"] for hit in hits] for hits in found] == names[rows][exact].tolist()
            np.testing.assert_allclose([[hit.score for hit in hits] for hits in found], scores, atol=1e-5)
            for one, hits in zip(
                searcher.find(asked, k=8, where=where, nprobe=1, exact=True), found, strict=True
            ):
                merged = rank([one], k=8, joining=Joining(), layout=searcher.layout).hits()
                assert [(hit.score, hit.document) for hit in merged] == [(h.score, h.document) for h in hits]
        for name in ("d7", "n3", "d149", "nothing"):  # replaced, new, as it was built, never there
            vector, topic = truth.get(name, (None, None))
            document, kept = searcher.get(name), searcher.vector(name)
            assert (document and document["topic"], document is None) == (topic, vector is None)
            assert (kept is None) == (vector is None)
            if kept is not None:
                np.testing.assert_allclose(kept, vector, atol=1e-6)
        counts = dict(zip(*np.unique(topics, return_counts=True), strict=True))
        assert searcher.facets(most=100) == {"topic": counts}

    agrees()
    fresh = vectors(40, 16, seed=5)
    # Some replace documents of the index, some are new.
    names = [f"d{number}" for number in range(5, 25)] + [f"n{number}" for number in range(20)]
    live.upsert(_documents(names, "new"), fresh)
    truth |= {name: (vector, "new") for name, vector in zip(names, fresh, strict=True)}
    agrees()
    gone = ["d5", "n3", "d200", "nobody"]
    live.delete(gone)
    truth = {name: value for name, value in truth.items() if name not in gone}
    agrees()
    for shard in live.shards:
        shard.merge()
    agrees()
    live.compact()
    agrees()
    with pytest.raises(SearchError, match="no filter by 'price': this index has topic"):
        searcher.search(asked, k=3, where={"price": 2})
    for none_asked in (partial(searcher.search, nprobe=0), LiveSearcher(live, nprobe=0).search):
        with pytest.raises(SearchError, match="nprobe is 0"):
            none_asked(asked, k=3)
    live.close()
