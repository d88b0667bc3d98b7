"""Lists copied, and lists cut down to some of their rows: codes move, nothing is encoded again."""

from dataclasses import replace

import faiss
import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.index import ivf
from scalingnote.index.ivf import Lists


def copy(lists: Lists) -> Lists:
    """The same rows, to be added to while the original is searched.

    Not by writing and parsing: while an index is written its centroids are set aside, and a search would miss
    them. The copy has centroids of its own.
    """
    index, kept = (
        None if stored is None else faiss.clone_index(stored) for stored in (lists.index, lists.kept)
    )
    return replace(lists, index=index, kept=kept)


def keep(lists: Lists, alive: Bool[ndarray, " rows"]) -> None:
    """Drop all rows but those alive, in place; the rows that stay are numbered anew, in their order.

    Nobody may search the lists meanwhile. Rows to come afterwards are to be `ivf.merge`d: fast scan's own
    adding would lay new codes over the remains of old ones in a half empty block (faiss 1.15.1).
    """
    dead = ivf.bitmap(~alive)
    selector = faiss.IDSelectorBitmap(len(dead), faiss.swig_ptr(dead))
    if lists.kept is not None:
        lists.kept.remove_ids(selector)  # a flat index closes its gaps itself
    if lists.index is None:
        return
    lists.index.remove_ids(selector)
    numbers = np.cumsum(alive) - 1
    inverted = lists.index.invlists
    for number in range(lists.index.nlist):
        if size := inverted.list_size(number):
            ids = faiss.rev_swig_ptr(inverted.get_ids(number), size)
            ids[:] = numbers[ids]
