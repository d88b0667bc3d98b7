"""Train or test: groups of documents joined by a query stay together, a seeded hash deals them out."""

import hashlib
from collections.abc import Iterable, Mapping


def uniform(key: str, *, seed: int) -> float:
    """A number in [0, 1) that depends on nothing but `key` and `seed`, on every machine."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def held_out(
    positives: Iterable[tuple[str, str]],
    *,
    query_ids: Iterable[str],
    group_of: Mapping[str, str],
    fraction: float,
    seed: int,
) -> set[str]:
    """The queries that are for test.

    `positives` are (query_id, doc_id) pairs, `group_of` maps doc_id to group. All groups a query touches,
    and all queries that touch them, form one unit; a unit is held out when the hash of its first group
    falls below `fraction`. So no query trains on a document whose group a test query is judged on.
    """
    parent: dict[str, str] = {}

    def find(node: str) -> str:
        root = node
        while parent.setdefault(root, root) != root:
            root = parent[root]
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    ids = list(query_ids)
    for query_id in ids:
        find(f"q:{query_id}")
    for query_id, doc_id in positives:
        first, second = sorted((find(f"q:{query_id}"), find(f"g:{group_of[doc_id]}")))
        parent[second] = first  # the smallest name becomes the root: "g:" sorts before "q:"
    return {q for q in ids if uniform(find(f"q:{q}"), seed=seed) < fraction}
