"""The networks of fusion and their losses: from an embedding and features to an embedding.

    out = unit(embedding + gate * network(embedding, features))        gate starts at 0 (ReZero)

:class:`DocumentNetwork` and :class:`QueryNetwork` pass their features to :class:`ResidualFusion` as slots. A
learnt row replaces a missing feature. If all features are missing, the embedding is returned bit for bit.

Documents that other users clicked are negatives, and popular ones are negatives too often. The softmax over
them is corrected for that, so that it estimates the softmax over all documents. Documents that the same user
saw in the same session and skipped are compared only with the click: neither popularity nor exposure biases
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64, Shaped
from numpy import ndarray
from torch import Tensor, nn

from scalingnote.fuse.config import DocumentSide, FusionLosses, QuerySide
from scalingnote.fuse.feature_encoding import Encoding
from scalingnote.train.engine import gather, rank
from scalingnote.train.losses import cross_entropy, prefixes

R = TypeVar("R", bound="_TensorRecord")
# The values of a feature, and which rows have one.
FeatureSlot = tuple[Float[Tensor, "rows _"], Bool[Tensor, " rows"]]
NO_WORD = -1.0  # importance in the places for which a query has no further word
EMBEDDING_WIDTH = 16  # of a value, a range, a word, a hashed id and a cross
WORD_STATISTICS = 4  # numbers in addition to the mean of a query's words, see _word_slot
WORD_BUCKETS, CROSS_BUCKETS = 16_384, 65_536  # rows of the tables of hashed words, and of hashed crosses
HIDDEN_WIDTH = 256  # of the layer between inputs and outputs


# --- inputs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorRecord:
    """A batch with tensors, or records of tensors, as its fields."""

    @classmethod
    def of(cls: type[R], **columns: Shaped[ndarray, "rows ..."]) -> R:
        """Build a batch with copies of these arrays as its fields."""
        return cls(**{name: torch.tensor(column) for name, column in columns.items()})

    def to(self: R, device: torch.device) -> R:
        """Copy the batch to a device."""
        return type(self)(**{name: part.to(device) for name, part in vars(self).items()})


@dataclass(frozen=True)
class DocumentInputs(_TensorRecord):
    """Inputs of :class:`DocumentNetwork`."""

    embeddings: Float[Tensor, "docs dim"]  # of unit length
    codes: Int[Tensor, "docs levels"]  # -1 in all levels: no semantic ID
    buckets: Int64[Tensor, " docs"]  # of the hashed doc_id
    features: Float[Tensor, "docs width"]  # declared ones, see feature_encoding


@dataclass(frozen=True)
class QueryInputs(_TensorRecord):
    """Inputs of :class:`QueryNetwork`."""

    embeddings: Float[Tensor, "queries dim"]  # of unit length
    words: Int64[Tensor, "queries words"]  # hashes, the most important first
    importances: Float[Tensor, "queries words"]  # NO_WORD if there is no word
    features: Float[Tensor, "queries width"]  # of the profile
    history: Int[Tensor, "queries last levels"]  # codes, the latest document last; -1 is no document


# --- parts of both sides ----------------------------------------------------------------------------------


class ResidualFusion(nn.Module):
    """The residual network of one side.

    `widths` are those of the features; `dropout` is the probability that training treats a feature of a row
    as missing.
    """

    def __init__(self, dim: int, widths: Sequence[int], *, dropout: float = 0.0) -> None:
        super().__init__()
        self._dropout = dropout
        self.missing = nn.ParameterList([nn.Parameter(torch.zeros(width)) for width in widths])
        width = dim + sum(widths)
        self.network = nn.Sequential(nn.Linear(width, HIDDEN_WIDTH), nn.ReLU(), nn.Linear(HIDDEN_WIDTH, dim))
        self.gate = nn.Parameter(torch.zeros(dim))

    def forward(
        self, embeddings: Float[Tensor, "rows dim"], features: Sequence[FeatureSlot]
    ) -> Float[Tensor, "rows dim"]:
        """Compute fused embeddings of unit length; `features` are in the order of `widths`."""
        present = torch.stack([known for _, known in features], dim=1)
        if self.training and self._dropout:
            present = present & (torch.rand(present.shape, device=present.device) >= self._dropout)
        slots = [
            torch.where(known[:, None], values, missing)
            for (values, _), known, missing in zip(features, present.unbind(1), self.missing, strict=True)
        ]
        # The correction is small at first: bfloat16 is precise enough for it, but not for the sum.
        correction = self.network(torch.cat([embeddings, *slots], dim=1)).float()
        fused = F.normalize(embeddings + self.gate * correction, dim=-1)
        return torch.where(present.any(dim=1, keepdim=True), fused, embeddings)


class SemanticIdEmbedding(nn.Module):
    """Embeddings of semantic IDs: the sum of a row per level, from tables that start as the codebooks."""

    def __init__(self, codebooks: Float[Tensor, "levels codes dim"]) -> None:
        super().__init__()
        self.levels, self.codes, self.dim = codebooks.shape
        self.tables = nn.Parameter(codebooks.detach().clone().flatten(0, 1))

    def forward(self, codes: Int[Tensor, "*rows levels"]) -> Float[Tensor, "*rows dim"]:
        """Sum the rows of all levels; a code of -1 adds nothing."""
        valid = codes >= 0
        rows = codes.clamp(min=0) + torch.arange(self.levels, device=codes.device) * self.codes
        return (F.embedding(rows, self.tables) * valid.unsqueeze(-1)).sum(dim=-2)


def _table(rows: int) -> nn.Embedding:
    """Create a table of random embeddings of about unit length."""
    weight = torch.randn(rows, EMBEDDING_WIDTH) * EMBEDDING_WIDTH**-0.5
    return nn.Embedding(rows, EMBEDDING_WIDTH, _weight=weight)


class FeatureColumns(nn.Module):
    """Slots of the declared features, in the order of declaration."""

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        super().__init__()
        self._widths = [encoding.width for encoding in encodings]
        self.tables = nn.ModuleList([_table(e.size) if e.size else nn.Identity() for e in encodings])
        self.widths = [EMBEDDING_WIDTH if encoding.size else encoding.width for encoding in encodings]

    def forward(self, features: Float[Tensor, "rows width"]) -> list[FeatureSlot]:
        """Return the embedding of a value that has one, and the numbers of other values."""
        slots = []
        for table, column in zip(self.tables, features.split(self._widths, dim=1), strict=True):
            values = column.nan_to_num()
            embedded = table(values[:, 0].long()) if isinstance(table, nn.Embedding) else values
            slots.append((embedded, ~column.isnan().any(dim=1)))
        return slots


# --- the two sides ----------------------------------------------------------------------------------------


class DocumentNetwork(nn.Module):
    """Network from embedding, semantic ID, hashed id and declared features to the final document embedding.

    Both sides share `semantic_ids`. `seen` are the buckets of ids in training (None: all): an id in another
    bucket is missing, because its row is random. `dropout` is that of :class:`ResidualFusion`.
    """

    seen: Bool[Tensor, " buckets"]

    def __init__(
        self,
        config: DocumentSide,
        encodings: Sequence[Encoding],
        *,
        semantic_ids: SemanticIdEmbedding,
        seen: Bool[Tensor, " buckets"] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config, self.encodings, self.semantic_ids = config, list(encodings), semantic_ids
        widths = [semantic_ids.dim]
        self.ids = None
        if config.id_buckets:
            self.ids = _table(config.id_buckets)
            seen = torch.ones(config.id_buckets, dtype=torch.bool) if seen is None else seen
            widths.append(EMBEDDING_WIDTH)
        self.register_buffer("seen", seen if config.id_buckets else None)
        self.columns = FeatureColumns(encodings)
        widths += self.columns.widths
        self.fusion = ResidualFusion(semantic_ids.dim, widths, dropout=dropout)

    def forward(self, documents: DocumentInputs) -> Float[Tensor, "docs dim"]:
        """Compute final embeddings; rows without any feature keep their embedding, bit for bit."""
        slots = [(self.semantic_ids(documents.codes), (documents.codes >= 0).all(dim=1))]
        if self.ids is not None:
            slots.append((self.ids(documents.buckets), self.seen[documents.buckets]))
        slots += self.columns(documents.features)
        fused: Tensor = self.fusion(documents.embeddings, slots)
        return fused


class QueryNetwork(nn.Module):
    """Network from embedding, planner's words, profile, crosses and history to the final query embedding.

    Both sides share `semantic_ids`. `dropout` is that of :class:`ResidualFusion`.
    """

    def __init__(
        self,
        config: QuerySide,
        encodings: Sequence[Encoding],
        *,
        semantic_ids: SemanticIdEmbedding,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config, self.encodings, self.semantic_ids = config, list(encodings), semantic_ids
        dim = semantic_ids.dim
        self.words = _table(WORD_BUCKETS)
        self.columns = FeatureColumns(encodings)
        starts = accumulate((encoding.width for encoding in encodings), initial=0)
        discrete = {e.feature.column: start for e, start in zip(encodings, starts, strict=False) if e.size}
        self._crossed = [discrete[column] for column in config.crosses]
        self.crosses = _table(CROSS_BUCKETS) if config.crosses else None
        self.pool = _HistoryPool(config.history, dim)
        widths = [EMBEDDING_WIDTH + WORD_STATISTICS, *self.columns.widths]
        widths += [*[EMBEDDING_WIDTH] * len(config.crosses), dim, dim]
        self.fusion = ResidualFusion(dim, widths, dropout=dropout)

    def forward(self, queries: QueryInputs) -> Float[Tensor, "queries dim"]:
        """Compute final embeddings; rows without any feature keep their embedding, bit for bit."""
        slots = [_word_slot(self.words(queries.words % WORD_BUCKETS), queries.importances)]
        slots += self.columns(queries.features)
        if self.crosses is not None:
            values = queries.features[:, self._crossed]
            buckets = self.crosses(cross_buckets(queries.words[:, 0], values.nan_to_num().long()))
            known = ~values.isnan() & (queries.importances[:, :1] != NO_WORD)
            slots += zip(buckets.unbind(1), known.unbind(1), strict=True)
        valid = (queries.history >= 0).all(dim=2)
        pooled = self.pool(queries.embeddings, self.semantic_ids(queries.history), valid)
        # The history, and its product with the query: the part of it that is relevant to the query.
        slots += [(value, valid.any(dim=1)) for value in (pooled, pooled * queries.embeddings)]
        fused: Tensor = self.fusion(queries.embeddings, slots)
        return fused


def cross_buckets(
    words: Int64[Tensor, " queries"], values: Int64[Tensor, "queries crosses"]
) -> Int64[Tensor, "queries crosses"]:
    """Compute a bucket for each pair of a query's most important word and a value of the profile.

    The multipliers and the first shift, which fills with zeros, are those of splitmix64 (Steele, Lea and
    Flood, 2014), as signed integers.
    """
    columns = torch.arange(1, 1 + values.shape[1], device=values.device) << 32
    mixed = words[:, None] ^ ((values + columns) * -0x61C8864680B583EB)
    mixed = (mixed ^ (mixed >> 31 & (1 << 33) - 1)) * -0x40A7B892E31B1A47
    return (mixed >> 20) % CROSS_BUCKETS


def _word_slot(
    words: Float[Tensor, "queries words width"], importances: Float[Tensor, "queries words"]
) -> FeatureSlot:
    """Compute the slot of the words: their mean, weighted by importance, and WORD_STATISTICS numbers.

    These are the share of places with a word, the highest and the mean importance, and the highest importance
    divided by the sum.
    """
    valid = importances != NO_WORD
    weights = importances * valid
    total, count = weights.sum(dim=1), valid.sum(dim=1)
    top = weights.amax(dim=1)
    mean = (words * weights.unsqueeze(2)).sum(dim=1) / total.clamp(min=1e-6).unsqueeze(1)
    statistics = [count / valid.shape[1], top, total / count.clamp(min=1), top / total.clamp(min=1e-6)]
    return torch.cat([mean, torch.stack(statistics, dim=1)], dim=1), count > 0


class _HistoryPool(nn.Module):
    """Pooling of the documents of a history to one vector, by the attention of the query."""

    def __init__(self, last: int, dim: int) -> None:
        super().__init__()
        # The identity: the score starts as the product of query and document, because tables of semantic IDs
        # start as the centroids.
        self.ask = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.ask.weight)
        self.recent = nn.Parameter(torch.zeros(last))

    def forward(
        self,
        queries: Float[Tensor, "queries dim"],
        documents: Float[Tensor, "queries last dim"],
        valid: Bool[Tensor, "queries last"],
    ) -> Float[Tensor, "queries dim"]:
        scores = torch.einsum("qd,qld->ql", self.ask(queries), documents) + self.recent
        # Not -inf, whose softmax is NaN for a user without history.
        weights = scores.masked_fill(~valid, -1e9).softmax(dim=1) * valid
        return torch.einsum("ql,qld->qd", weights.float(), documents)


# --- losses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clicks(_TensorRecord):
    """One rank's rows of a step: each query's clicked document, and those skipped in the same session."""

    queries: QueryInputs
    documents: DocumentInputs  # row by row of `group`
    group: Int[Tensor, "queries group"]  # row numbers of the corpus, the clicked one first; -1: no document
    log_q: Float[Tensor, " queries"]  # log of the share of clicks that the clicked document has


class FusionStage(nn.Module):
    """Both sides and the losses, as the one module that is trained."""

    def __init__(self, documents: DocumentNetwork, queries: QueryNetwork, losses: FusionLosses) -> None:
        super().__init__()
        self.documents, self.queries, self._losses = documents, queries, losses

    def forward(self, clicks: Clicks) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the loss of this rank and its parts for the log; its mean over ranks is the global loss."""
        queries = self.queries(clicks.queries).float()
        documents = self.documents(clicks.documents).float().unflatten(0, clicks.group.shape)
        # bfloat16 would round cosines to 1/256, twenty times that when divided by the temperature.
        with torch.autocast(queries.device.type, enabled=False):
            loss, parts = fusion_loss(queries, documents, clicks, self._losses)
        return loss, {name: part.detach() for name, part in parts.items()}


def fusion_loss(
    queries: Float[Tensor, "queries dim"],
    documents: Float[Tensor, "queries group dim"],
    clicks: Clicks,
    losses: FusionLosses,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Compute both losses, summed over Matryoshka prefixes; the batch is that of all ranks.

        s_c(x_i, y_j) = s(x_i, y_j) - log p_j
        batch = -mean_i log( exp s_c(x_i, y_i) / sum_j exp s_c(x_i, y_j) )

    (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
    section 3: s^c, and the batch softmax of it). p_j is the probability that a row of a batch has document j:
    its share of all clicks in training, which is counted, not estimated from a stream. A factor common to all
    p, such as the batch size, cancels. A query's own document in other rows is ignored.
    """
    all_clicked_rows = gather(clicks.group[:, 0])
    log_q, clicked = gather(clicks.log_q), gather(documents[:, 0])
    positives = torch.arange(len(queries), device=queries.device) + rank() * len(queries)
    same = clicks.group[:, :1] == all_clicked_rows
    parts = {"batch": queries.new_zeros(()), "skipped": queries.new_zeros(())}
    for query, all_clicked, group in prefixes(queries, clicked, documents, dims=losses.matryoshka):
        scores = query @ all_clicked.T / losses.temperature - log_q
        parts["batch"] += cross_entropy(scores, positives=positives, ignore=same)
        scores = torch.einsum("qd,qgd->qg", query, group) / losses.temperature
        first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
        parts["skipped"] += cross_entropy(scores, positives=first, ignore=clicks.group < 0)
    return parts["batch"] + parts["skipped"], parts
