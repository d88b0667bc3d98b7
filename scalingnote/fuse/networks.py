"""The networks of fusion and their losses: from an embedding and features to an embedding.

    out = unit(embedding + gate * network(embedding, features))        gate starts at 0 (ReZero)

:class:`DocumentNetwork` and :class:`QueryNetwork` give their features to :class:`ResidualFusion` as slots. A
learnt row replaces a missing feature. Where all features are missing, the embedding is returned bit for bit.

In training, documents of other rows are negatives because some user clicked them: popular ones more often
than their share of the corpus. The softmax over them is corrected for that, so that it estimates the softmax
over all documents. The documents that the same user saw in the same session and skipped are scored beside the
click alone: they were shown, so neither popularity nor exposure biases them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from scalingnote.fuse.config import DocumentSide, FusionLosses, QuerySide
from scalingnote.fuse.feature_encoding import EMBEDDING_WIDTH, MISSING_INDEX, Encoding
from scalingnote.train.engine import gather, rank
from scalingnote.train.losses import cross_entropy, prefixes

R = TypeVar("R", bound="_TensorRecord")
# The values of a feature, and which rows have one.
FeatureSlot = tuple[Float[Tensor, "rows _"], Bool[Tensor, " rows"]]
NO_WORD = -1.0  # importance in a place where a query has no further word
WORD_STATISTICS = 4  # numbers beside the mean of a query's words, see _word_slot
WORD_BUCKETS, CROSS_BUCKETS = 16_384, 65_536  # rows of the tables of hashed words, and of hashed crosses
HIDDEN_WIDTH = 256  # of the layer between inputs and outputs


# --- inputs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorRecord:
    """A batch whose fields are tensors or records of tensors."""

    def to(self: R, device: torch.device) -> R:
        """A copy on a device."""
        return type(self)(**{name: part.to(device) for name, part in vars(self).items()})


@dataclass(frozen=True)
class DocumentInputs(_TensorRecord):
    """Inputs of :class:`DocumentNetwork`."""

    embeddings: Float[Tensor, "docs dim"]  # of unit length
    codes: Int[Tensor, "docs levels"]  # -1 in all levels: no semantic ID
    buckets: Int[Tensor, " docs"]  # of the hashed doc_id
    indices: Int[Tensor, "docs indices"]  # of declared features, see feature_encoding
    numbers: Float[Tensor, "docs numbers"]


@dataclass(frozen=True)
class QueryInputs(_TensorRecord):
    """Inputs of :class:`QueryNetwork`."""

    embeddings: Float[Tensor, "queries dim"]  # of unit length
    words: Int64[Tensor, "queries words"]  # buckets
    importances: Float[Tensor, "queries words"]  # NO_WORD where there is no word
    indices: Int[Tensor, "queries indices"]  # of the profile
    numbers: Float[Tensor, "queries numbers"]
    crosses: Int64[Tensor, "queries crosses"]  # buckets; -1 is missing
    history: Int64[Tensor, "queries last levels"]  # codes, the latest document last; -1 is no document


# --- parts of both sides ----------------------------------------------------------------------------------


class ResidualFusion(nn.Module):
    """The residual network of one side; without features it is the identity.

    `widths` are those of the features; `dropout` is the probability with which training replaces a feature of
    a row as if it were missing.
    """

    def __init__(self, dim: int, widths: Sequence[int], *, dropout: float = 0.0) -> None:
        super().__init__()
        self._dropout = dropout
        self.missing = nn.ParameterList([nn.Parameter(torch.zeros(width)) for width in widths])
        self.network = None
        if widths:
            width = dim + sum(widths)
            self.network = nn.Sequential(
                nn.Linear(width, HIDDEN_WIDTH), nn.ReLU(), nn.Linear(HIDDEN_WIDTH, dim)
            )
        self.gate = nn.Parameter(torch.zeros(dim)) if widths else None

    def forward(
        self, embeddings: Float[Tensor, "rows dim"], features: Sequence[FeatureSlot]
    ) -> Float[Tensor, "rows dim"]:
        """Fused embeddings of unit length; `features` in the order of `widths`."""
        if self.network is None or self.gate is None:
            return embeddings
        present = torch.stack([known for _, known in features], dim=1)
        if self.training and self._dropout:
            present = present & (torch.rand(present.shape, device=present.device) >= self._dropout)
        slots = [
            torch.where(known[:, None], values, missing)
            for (values, _), known, missing in zip(features, present.unbind(1), self.missing, strict=True)
        ]
        # The correction is small at first: bfloat16 is exact enough for it, but not for the sum.
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
        """The sum over levels; a code of -1 adds nothing."""
        valid = codes >= 0
        rows = codes.clamp(min=0) + torch.arange(self.levels, device=codes.device) * self.codes
        return (F.embedding(rows, self.tables) * valid.unsqueeze(-1)).sum(dim=-2)


class HashTable(nn.Module):
    """An embedding per bucket; bucket -1 is a missing value."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(buckets, EMBEDDING_WIDTH) * EMBEDDING_WIDTH**-0.5)

    def forward(self, bucket: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows width"]:
        """The embedding of each bucket."""
        return F.embedding(bucket.clamp(min=0), self.rows)


class FeatureColumns(nn.Module):
    """Slots of the declared features."""

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        super().__init__()
        self._sizes = [encoding.width for encoding in encodings if not encoding.size]
        self.tables = nn.ModuleList([HashTable(e.size) for e in encodings if e.size])
        self.widths = [EMBEDDING_WIDTH] * len(self.tables) + self._sizes

    def forward(
        self, indices: Int[Tensor, "rows indices"], numbers: Float[Tensor, "rows numbers"]
    ) -> list[FeatureSlot]:
        """First the features with a table, then the others, both in the order of declaration."""
        slots = [
            (table(index), index != MISSING_INDEX)
            for table, index in zip(self.tables, indices.unbind(1), strict=True)
        ]
        for values in numbers.split(self._sizes, dim=1) if self._sizes else ():
            slots.append((values.nan_to_num(), ~values.isnan().any(dim=1)))
        return slots


# --- the two sides ----------------------------------------------------------------------------------------


class DocumentNetwork(nn.Module):
    """Final document embeddings from embedding, semantic ID, hashed id and declared features.

    Both sides share `semantic_ids`. `seen` are the buckets of ids in training: an id in another bucket is
    missing, as its row is random. `dropout` is that of :class:`ResidualFusion`.
    """

    seen: Bool[Tensor, " buckets"]

    def __init__(
        self,
        config: DocumentSide,
        encodings: Sequence[Encoding],
        *,
        dim: int,
        semantic_ids: SemanticIdEmbedding | None,
        seen: Bool[Tensor, " buckets"] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.semantic_ids = semantic_ids if config.semantic_ids else None
        self.dim, widths = dim, [dim] * config.semantic_ids
        self.ids = None
        if config.id_buckets:
            self.ids = HashTable(config.id_buckets)
            seen = torch.ones(config.id_buckets, dtype=torch.bool) if seen is None else seen
            widths.append(EMBEDDING_WIDTH)
        self.register_buffer("seen", seen if config.id_buckets else None)
        self.columns = FeatureColumns(encodings)
        widths += self.columns.widths
        self.fusion = ResidualFusion(dim, widths, dropout=dropout)

    def forward(self, documents: DocumentInputs) -> Float[Tensor, "docs dim"]:
        """Rows without any feature keep their embedding, bit for bit."""
        slots: list[FeatureSlot] = []
        if self.semantic_ids is not None:
            slots.append((self.semantic_ids(documents.codes), (documents.codes >= 0).all(dim=1)))
        if self.ids is not None:
            slots.append((self.ids(documents.buckets), self.seen[documents.buckets]))
        slots += self.columns(documents.indices, documents.numbers)
        fused: Tensor = self.fusion(documents.embeddings, slots)
        return fused


class QueryNetwork(nn.Module):
    """Final query embeddings from embedding, planner's words, profile, crosses and history of the user.

    Both sides share `semantic_ids`, which a history needs. `dropout` is that of :class:`ResidualFusion`.
    """

    def __init__(
        self,
        config: QuerySide,
        encodings: Sequence[Encoding],
        *,
        dim: int,
        semantic_ids: SemanticIdEmbedding | None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, widths = dim, list[int]()
        self.words = self.semantic_ids = self.pool = self.crosses = None
        if config.planner:
            self.words = HashTable(WORD_BUCKETS)
            widths.append(EMBEDDING_WIDTH + WORD_STATISTICS)
        self.columns = FeatureColumns(encodings)
        widths += self.columns.widths
        if config.crosses:
            self.crosses = HashTable(CROSS_BUCKETS)
            widths += [EMBEDDING_WIDTH] * len(config.crosses)
        if config.history:
            assert semantic_ids is not None, "a history needs the tables of semantic IDs"
            self.semantic_ids, self.pool = semantic_ids, _HistoryPool(config.history, dim)
            widths += [dim, dim]
        self.fusion = ResidualFusion(dim, widths, dropout=dropout)

    def forward(self, queries: QueryInputs) -> Float[Tensor, "queries dim"]:
        """Rows without any feature keep their embedding, bit for bit."""
        slots: list[FeatureSlot] = []
        if self.words is not None:
            slots.append(_word_slot(self.words(queries.words), queries.importances))
        slots += self.columns(queries.indices, queries.numbers)
        if self.crosses is not None:
            slots += [(self.crosses(bucket), bucket >= 0) for bucket in queries.crosses.unbind(1)]
        if self.pool is not None and self.semantic_ids is not None:
            valid = (queries.history >= 0).all(dim=2)
            pooled = self.pool(queries.embeddings, self.semantic_ids(queries.history), valid)
            # The history alone, and its product with the query: the part of it that bears on the query.
            slots += [(value, valid.any(dim=1)) for value in (pooled, pooled * queries.embeddings)]
        fused: Tensor = self.fusion(queries.embeddings, slots)
        return fused


def _word_slot(
    words: Float[Tensor, "queries words width"], importances: Float[Tensor, "queries words"]
) -> FeatureSlot:
    """The words' mean, weighted by importance; their number, highest and mean importance, and its ratio."""
    valid = importances != NO_WORD
    weights = importances * valid
    total, count = weights.sum(dim=1), valid.sum(dim=1)
    top = weights.amax(dim=1)
    mean = (words * weights.unsqueeze(2)).sum(dim=1) / total.clamp(min=1e-6).unsqueeze(1)
    statistics = [count / valid.shape[1], top, total / count.clamp(min=1), top / total.clamp(min=1e-6)]
    return torch.cat([mean, torch.stack(statistics, dim=1)], dim=1), count > 0


class _HistoryPool(nn.Module):
    """Pools the documents of a history to one vector, by the attention of the query."""

    def __init__(self, last: int, dim: int) -> None:
        super().__init__()
        # Starts as the cosine of query and document: tables of semantic IDs start as the centroids.
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
    group: Int[Tensor, "queries group"]  # row numbers of the corpus, the clicked first; -1 is no document
    log_q: Float[Tensor, " queries"]  # log of the share of clicks that the clicked document has


class FusionStage(nn.Module):
    """Both sides and the losses as the one module that training steps."""

    def __init__(self, documents: DocumentNetwork, queries: QueryNetwork, losses: FusionLosses) -> None:
        super().__init__()
        self.documents, self.queries, self._losses = documents, queries, losses

    def forward(self, clicks: Clicks) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The loss of this rank, whose mean over ranks is the global loss, and its parts for the log."""
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
    """Both losses, summed over Matryoshka prefixes; the batch is that of all ranks.

        s_c(x_i, y_j) = s(x_i, y_j) - log p_j
        batch = -mean_i log( exp s_c(x_i, y_i) / sum_j exp s_c(x_i, y_j) )

    (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
    section 3: s^c, and the batch softmax of it). p_j is the probability that a row of a batch has document j:
    its share of all clicks in training, counted rather than estimated from a stream. A factor common to all
    p, such as the batch size, cancels. A query's own document in other rows is ignored.
    """
    all_clicked_rows = gather(clicks.group[:, 0])
    log_q, clicked = gather(clicks.log_q), gather(documents[:, 0])
    positives = torch.arange(len(queries), device=queries.device) + rank() * len(queries)
    same = clicks.group[:, :1] == all_clicked_rows
    parts = {"batch": queries.new_zeros(()), "skipped": queries.new_zeros(())}
    for query, all_clicked, own in prefixes(queries, clicked, documents, dims=losses.matryoshka):
        scores = query @ all_clicked.T / losses.temperature - log_q
        parts["batch"] += cross_entropy(scores, positives=positives, ignore=same)
        if losses.skipped:
            scores = torch.einsum("qd,qgd->qg", query, own) / losses.temperature
            first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
            parts["skipped"] += cross_entropy(scores, positives=first, ignore=clicks.group < 0)
    return parts["batch"] + parts["skipped"], parts
