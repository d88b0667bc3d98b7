"""Search of a live index: a search sees one moment of each shard, with all writes acknowledged before it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.index import filters
from scalingnote.index.live.index import LiveIndex
from scalingnote.search import scan
from scalingnote.search.searcher import checked_nprobe, unit_queries


class Hit(NamedTuple):
    """A document found, as it was at the moment of the search."""

    score: float
    document: Mapping[str, Any]


class LiveSearcher:
    """Searches what a live index holds. Threads may share one."""

    def __init__(self, index: LiveIndex, *, nprobe: int | None = None) -> None:
        self._index, self._nprobe = index, nprobe

    def search(
        self,
        queries: Float[ndarray, "queries dim"],
        *,
        k: int,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
    ) -> list[list[Hit]]:
        """The k best documents of each query, best first; all there are where there are fewer.

        The same queries and filters as :meth:`scalingnote.search.searcher.Searcher.search` takes.
        """
        layout, snapshots = self._index.layout, self._index.snapshots()
        unit = unit_queries(queries, dim=layout.dim, k=k)
        probes = checked_nprobe(nprobe or self._nprobe or layout.nprobe, layout.nlist)
        segments = [segment for snapshot in snapshots for segment in snapshot.segments]
        if where:
            filters.check(where, layout.fields(segments[0].documents.schema))
        masks = []
        for segment in segments:
            mask = segment.alive
            if where:
                wanted = filters.mask(segment.documents, where)
                mask = wanted if mask is None else mask & wanted
            masks.append(mask)
        plan = scan.Plan(probes, layout.refine_factor)
        found = scan.search([segment.lists for segment in segments], unit, k=k, plan=plan, masks=masks)
        hits = np.empty(found.rows.shape, object)
        for number, segment in enumerate(segments):
            here = found.segments == number
            documents = segment.documents.take(pa.array(found.rows[here])).to_pylist()
            for place, score, document in zip(
                np.argwhere(here), found.scores[here].tolist(), documents, strict=True
            ):
                hits[tuple(place)] = Hit(score, document)
        return [[hit for hit in row if hit is not None] for row in hits.tolist()]
