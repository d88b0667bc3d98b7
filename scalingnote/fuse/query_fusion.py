"""The query side: embedding, what the planner says, profile and history of the user, and their crosses.

:class:`QueryFusion` is what serving loads; the network inside is trained by the stage. Whatever is not known
of a query or a user is missing, as it is in training now and then: an anonymous query without a planner is
its plain embedding, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt64
from numpy import ndarray
from torch import Tensor, nn

from scalingnote.config import validate
from scalingnote.fuse.config import History, QuerySide
from scalingnote.fuse.document_fusion import FACTS, load, tables, write
from scalingnote.fuse.feature_encoding import MISSING, Encoded, Encoding, encode_mappings
from scalingnote.fuse.features import User
from scalingnote.fuse.network import Fusion, Slot
from scalingnote.fuse.slots import Columns, HashTable, SemanticIds
from scalingnote.planner.terms import TermScores

NO_WORD = -1.0  # importance of a place where a query has no further word
_STATISTICS = 4


@dataclass(frozen=True)
class Words:
    """The most important words of each query, the most important first."""

    hashes: UInt64[ndarray, "queries words"]
    importances: Float32[ndarray, "queries words"]  # NO_WORD where there is none


@dataclass(frozen=True)
class Queries:
    """What the network reads of some queries and who asks them."""

    embeddings: Float[Tensor, "queries dim"]  # of unit length
    words: Int64[Tensor, "queries words"]  # buckets
    importances: Float[Tensor, "queries words"]  # NO_WORD where there is no word
    indices: Tensor  # [queries indices] of the profile
    numbers: Float[Tensor, "queries numbers"]
    crosses: Int64[Tensor, "queries crosses"]  # buckets; -1 is missing
    history: Int64[Tensor, "queries last levels"]  # codes, the latest last; -1 is no document

    def to(self, device: torch.device) -> "Queries":
        """The same on a device."""
        return Queries(**{name: part.to(device) for name, part in vars(self).items()})


class QueryNetwork(nn.Module):
    """Queries in, final embeddings of unit length out."""

    def __init__(
        self,
        config: QuerySide,
        encodings: Sequence[Encoding],
        *,
        dim: int,
        semantic_ids: SemanticIds | None,
        hide: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, widths = dim, list[int]()
        self.words = self.semantic_ids = self.pool = self.crosses = None
        if config.planner:
            self.words = HashTable(config.planner.buckets, config.planner.width)
            widths.append(config.planner.width + _STATISTICS)
        self.columns = Columns(encodings)
        widths += self.columns.widths
        if config.crosses:
            self.crosses = HashTable(config.cross_buckets, config.cross_width)
            widths += [config.cross_width] * len(config.crosses)
        if config.history:
            assert semantic_ids is not None, "a history is one of semantic IDs"
            self.semantic_ids, self.pool = semantic_ids, _Pool(config.history, dim)
            widths += [dim, dim]
        self.fusion = Fusion(config.network, dim=dim, widths=widths, hide=hide)

    def forward(self, queries: Queries) -> Float[Tensor, "queries dim"]:
        """Rows of which every feature is missing come out as their embeddings went in."""
        slots: list[Slot] = []
        if self.words is not None:
            slots.append(_planned(self.words(queries.words), queries.importances))
        slots += self.columns(queries.indices, queries.numbers)
        if self.crosses is not None:
            slots += [(self.crosses(bucket), bucket >= 0) for bucket in queries.crosses.unbind(1)]
        if self.pool is not None and self.semantic_ids is not None:
            there = (queries.history >= 0).all(dim=2)
            liked = self.pool(queries.embeddings, self.semantic_ids(queries.history), there)
            # The history alone, and crossed with the query: what of it bears on what is asked.
            slots += [(value, there.any(dim=1)) for value in (liked, liked * queries.embeddings)]
        fused: Tensor = self.fusion(queries.embeddings, slots)
        return fused


class QueryFusion:
    """A trained query side, ready to serve."""

    def __init__(self, network: QueryNetwork, config: QuerySide, encodings: Sequence[Encoding]) -> None:
        self._network, self._config, self._encodings = network.eval(), config, list(encodings)

    def fuse(
        self,
        embeddings: Float[ndarray, "queries dim"],
        *,
        terms: TermScores | None = None,
        users: Sequence[User | None] | None = None,
    ) -> Float32[ndarray, "queries dim"]:
        """Final embeddings of unit length.

        `embeddings` are the query tower's, at unit length; `terms` what the planner says of the same queries;
        `users` who asks each, None for one who is not known.
        """
        rows = len(embeddings)
        known = [user or User() for user in (users or [None] * rows)]
        words = important(terms, rows, most=self._config.planner.words if self._config.planner else 0)
        profile = encode_mappings(self._encodings, [user.profile for user in known])
        queries = assemble(
            np.array(embeddings, np.float32),
            words,
            profile,
            self._histories([user.history for user in known]),
            config=self._config,
            encodings=self._encodings,
        )
        with torch.no_grad():
            return self._network(queries).numpy()  # type: ignore[no-any-return]

    def _histories(self, histories: Sequence[Sequence[str]]) -> Int64[ndarray, "queries last levels"]:
        if self._config.history is None or self._network.semantic_ids is None:
            return np.zeros((len(histories), 0, 0), np.int64)
        tables = self._network.semantic_ids
        read = [[codes_of(name, tables.levels, tables.codes) for name in history] for history in histories]
        known = [[codes for codes in history if codes is not None] for history in read]
        return latest(known, last=self._config.history.last, levels=tables.levels)

    def save(self, folder: Path) -> None:
        """Write weights and facts; :meth:`load` reads them."""
        write(folder, self._network, self._config, {"profile": self._encodings})

    @classmethod
    def load(cls, folder: Path) -> "QueryFusion":
        """The query side of a folder. ArtifactError when there is none."""
        weights, facts = load(folder)
        config = validate(QuerySide, facts["config"], source=str(folder / FACTS))
        network = QueryNetwork(config, facts["profile"], dim=facts["dim"], semantic_ids=tables(facts))
        network.load_state_dict(weights)
        return cls(network, config, facts["profile"])


# --- from what is known to what the network reads ---------------------------------------------------------


def important(terms: TermScores | None, rows: int, *, most: int) -> Words:
    """The `most` important words of each query; of equal ones that which comes first in it."""
    hashes, importances = np.zeros((rows, most), np.uint64), np.full((rows, most), NO_WORD, np.float32)
    if terms is not None and most:
        query = np.repeat(np.arange(rows), np.diff(terms.offsets))
        order = np.lexsort((-terms.scores, query))
        place = np.arange(len(query)) - terms.offsets[query]
        kept = place < most
        hashes[query[kept], place[kept]] = terms.terms[order][kept]
        importances[query[kept], place[kept]] = terms.scores[order][kept]
    return Words(hashes, importances)


def assemble(
    embeddings: Float32[ndarray, "queries dim"],
    words: Words,
    profile: Encoded,
    history: Int64[ndarray, "queries last levels"],
    *,
    config: QuerySide,
    encodings: Sequence[Encoding],
) -> Queries:
    """Rows as the network reads them, the same in training and in serving."""
    size = np.uint64(config.planner.buckets if config.planner else 1)
    discrete = [encoding.feature.column for encoding in encodings if encoding.size]
    places = [discrete.index(column) for column in config.crosses]
    return Queries(
        embeddings=torch.from_numpy(embeddings),
        words=torch.from_numpy((words.hashes % size).astype(np.int64)),
        importances=torch.from_numpy(words.importances),
        indices=torch.from_numpy(profile.indices),
        numbers=torch.from_numpy(profile.numbers),
        crosses=torch.from_numpy(_crossed(words, profile.indices[:, places], config.cross_buckets)),
        history=torch.from_numpy(history),
    )


def latest(
    histories: Sequence[Sequence[ndarray] | ndarray], *, last: int, levels: int
) -> Int64[ndarray, "queries last levels"]:
    """The last codes of each history, the latest in the last place; -1 in the places before them."""
    out = np.full((len(histories), last, levels), -1, np.int64)
    for row, history in enumerate(histories):
        for place, codes in enumerate(reversed(history[-last:]), 1):
            out[row, -place] = codes
    return out


def codes_of(semantic_id: str, levels: int, size: int) -> Int64[ndarray, " levels"] | None:
    """The codes of an ID "c0-c1-...-suffix"; None when it is none of these codebooks'."""
    parts = semantic_id.split("-")
    if len(parts) != levels + 1 or not all(part.isdecimal() for part in parts):
        return None
    codes = np.array(parts[:levels], np.int64)
    return codes if (codes < size).all() else None


def _crossed(words: Words, indices: ndarray, buckets: int) -> Int64[ndarray, "queries crosses"]:
    """A bucket for each pair of a query's most important word and a value of the profile."""
    if not indices.shape[1]:
        return np.zeros(indices.shape, np.int64)
    mixed = words.hashes[:, :1] ^ (
        (indices.astype(np.uint64) + np.arange(1, 1 + indices.shape[1], dtype=np.uint64) * np.uint64(1 << 32))
        * np.uint64(0x9E3779B97F4A7C15)
    )
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    there = (words.importances[:, :1] != NO_WORD) & (indices != MISSING)
    return np.where(there, (mixed >> np.uint64(20)) % np.uint64(buckets), -1).astype(np.int64)


# --- inside the network -----------------------------------------------------------------------------------


def _planned(
    words: Float[Tensor, "queries words width"], importances: Float[Tensor, "queries words"]
) -> Slot:
    """The mean of the words by importance; how many, how important the first, on average, and its share."""
    there = importances != NO_WORD
    weights = importances * there
    total, count = weights.sum(dim=1), there.sum(dim=1)
    top = weights.amax(dim=1)
    mean = (words * weights.unsqueeze(2)).sum(dim=1) / total.clamp(min=1e-6).unsqueeze(1)
    spread = [count / there.shape[1], top, total / count.clamp(min=1), top / total.clamp(min=1e-6)]
    return torch.cat([mean, torch.stack(spread, dim=1)], dim=1), count > 0


class _Pool(nn.Module):
    """A history becomes one vector: its mean, or what the query attends to."""

    def __init__(self, config: History, dim: int) -> None:
        super().__init__()
        self.ask = self.recent = None
        if config.pool == "attention":
            # Starts as the cosine of query and document: tables of semantic IDs start as the centroids.
            self.ask = nn.Linear(dim, dim, bias=False)
            nn.init.eye_(self.ask.weight)
            self.recent = nn.Parameter(torch.zeros(config.last))

    def forward(
        self,
        queries: Float[Tensor, "queries dim"],
        documents: Float[Tensor, "queries last dim"],
        there: Tensor,
    ) -> Float[Tensor, "queries dim"]:
        if self.ask is None or self.recent is None:
            weights = there / there.sum(dim=1, keepdim=True).clamp(min=1)
        else:
            scores = torch.einsum("qd,qld->ql", self.ask(queries), documents) + self.recent
            # Not -inf: a user without history has no softmax then, and one of nothing here.
            weights = scores.masked_fill(~there, -1e9).softmax(dim=1) * there
        return torch.einsum("ql,qld->qd", weights.float(), documents)
