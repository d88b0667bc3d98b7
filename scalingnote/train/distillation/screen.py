"""Screen teachers: which teacher gives a good token table on given texts, by a closed-form fit in minutes.

    texts -> pseudo-queries -> teacher: embeddings Y [n, dim], scaled to unit length
                            -> token shares X [n, tokens], sparse
    table W [tokens, dim]: argmin |X W - Y|^2 + ridge |W|^2 over the pseudo-queries of 80 % of the documents
    held-out pseudo-queries: cosine of table and teacher, share of the teacher's top 10 that the table finds,
                             by the teacher's own similarity

A table that is trained on more texts is better than this one. The numbers compare teachers on one set of
texts, and are not comparable between sets.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import scipy.linalg
import scipy.sparse
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import DataError, ScalingNoteError
from scalingnote.core.log import elapsed_status, get_logger, status_lines
from scalingnote.core.model_files import local_folder
from scalingnote.core.reports import ReportTable
from scalingnote.datasets.input_files import RawRow
from scalingnote.datasets.splits import subset
from scalingnote.encode.encoder import Encoder
from scalingnote.models.adopt import open_tower
from scalingnote.models.config import AdoptConfig
from scalingnote.models.weights import compute_dtype, default_device
from scalingnote.storage.arrow import as_searched, l2_normalize
from scalingnote.storage.shuffle import hash_of
from scalingnote.train.distillation.agreement import median_ms, neighbour_overlap
from scalingnote.train.distillation.config import ScreenConfig
from scalingnote.triplets.config import PseudoQueriesConfig
from scalingnote.triplets.pseudo_queries.sampling import draw

log = get_logger("distill")
SEED = 0  # for the sampled documents, the draws and the held-out documents
HELD_OUT_SHARE = 0.2  # share of the documents with texts for measurement
# Factor of the squared norm: all-MiniLM-L6-v2 on feedbackqa overlaps by .48, .51, .44 with .001, .01, .1.
RIDGE = 0.01
NEIGHBOURS = 10  # number of the teacher's results that the table should find
MIN_TEXTS = 100  # distinct pseudo-queries; a fit on fewer is meaningless
TEACHER_QUERIES, TABLE_QUERIES = 50, 200  # upper limits, for the median of times


@dataclass(frozen=True)
class TextSplit:
    """Pseudo-queries to fit on, and others of other documents to measure with."""

    train: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class ScreenedTeacher:
    """Measures of one teacher's table; sizes and times are the teacher's, except `tokens` and `table_ms`."""

    model: str
    overlap: float
    """Share of the teacher's ten nearest training texts that the table finds, mean of the held-out texts."""
    cosine: float
    """Cosine of table and teacher, mean over the held-out texts."""
    dimensions: int
    parameters: int
    tokens: int
    """Distinct tokens of the training texts: rows of the table."""
    teacher_ms: float
    """Median of one query at a time on this machine, text to embedding."""
    table_ms: float
    seconds: float
    """Duration of the entire screening of this teacher."""


def screen(models: Sequence[str], documents: Iterable[RawRow], config: ScreenConfig) -> list[ScreenedTeacher]:
    """Fit a table to each teacher; sort the teachers by how well their tables reproduce them, best first.

    Args:
        models: hub ids or folders of published embedding models.
        documents: rows with doc_id, title and content; read once, a sample of at most `config.count` rows is
            kept.
        config: number of texts.

    Raises:
        DataError: the documents give fewer than :data:`MIN_TEXTS` distinct pseudo-queries.
        ScalingNoteError: no model could be screened. A model that cannot be screened is logged and left out.
    """
    folders: dict[str, str] = {}
    problems: dict[str, ScalingNoteError] = {}
    for model in dict.fromkeys(models):
        try:
            folders[model] = str(local_folder(model))
        except ScalingNoteError as error:
            problems[model] = error
    if not folders:
        raise next(iter(problems.values()))
    texts = draw_texts(documents, config)
    screened = []
    for model, folder in folders.items():
        try:
            with status_lines("distill", elapsed_status(f"screening {model}")):
                screened.append(replace(screen_one(folder, texts), model=model))
        except ScalingNoteError as error:
            problems[model] = error
    for model, problem in problems.items():
        log.error("%s is left out: %s", model, problem)
    if not screened:
        raise next(iter(problems.values()))
    return sorted(screened, key=lambda teacher: -teacher.overlap)


def draw_texts(documents: Iterable[RawRow], config: ScreenConfig) -> TextSplit:
    """Draw distinct pseudo-queries from a sample of documents; those of some documents are held out.

    Raises:
        DataError: there are too few, or all come from one document.
    """
    chosen = subset(documents, size=config.count, seed=SEED, key="doc_id")
    keys = hash_of(pa.array([row["doc_id"] for row in chosen], pa.string())).tolist()
    last = np.random.default_rng(SEED).permutation(len(chosen))[: round(HELD_OUT_SHARE * len(chosen))]
    held_out = set(last.tolist())
    settings = PseudoQueriesConfig(seed=SEED)
    seen: set[str] = set()
    sides: tuple[list[str], list[str]] = ([], [])
    for number, (key, row) in enumerate(zip(keys, chosen, strict=True)):
        texts = draw(key, row["title"], row["content"], settings, per_document=config.count / len(chosen))
        for text in texts:
            if text.casefold() not in seen:
                seen.add(text.casefold())
                sides[number in held_out].append(text)
    if len(seen) < MIN_TEXTS or not all(sides):
        raise DataError(
            f"{len(chosen):,} documents give {len(seen):,} distinct pseudo-queries, {len(sides[1]):,} of "
            f"them held out: a fit needs {MIN_TEXTS} and some held out; give more texts"
        )
    log.info("%d pseudo-queries of %d documents, %d held out", len(seen), len(chosen), len(sides[1]))
    return TextSplit(*sides)


def screen_one(model: str, texts: TextSplit) -> ScreenedTeacher:
    """Encode the texts with a published teacher, fit its table, and compare the two.

    Raises:
        ConfigError: the model cannot be read.
    """
    start = time.perf_counter()
    tower = open_tower(AdoptConfig(path=model), "query", dtype=compute_dtype("auto", default_device()))
    teacher = Encoder(tower)
    embedded = teacher.encode_queries(texts.train)
    train, held_out = l2_normalize(embedded), l2_normalize(teacher.encode_queries(texts.held_out))
    searched = as_searched(embedded, tower.native.similarity)
    tokens, held_out_tokens = (token_ids(teacher, side) for side in (texts.train, texts.held_out))
    table = RidgeTable.fit(tokens, train, ridge=RIDGE)
    embeddings = np.stack([table.embed(ids) for ids in held_out_tokens])
    return ScreenedTeacher(
        model=model,
        overlap=neighbour_overlap(held_out, embeddings, searched, k=NEIGHBOURS),
        cosine=float((embeddings * held_out).sum(axis=1).mean()),
        dimensions=train.shape[1],
        parameters=sum(parameter.numel() for parameter in teacher.tower.parameters()),
        tokens=len(table.rows),
        teacher_ms=median_ms(lambda text: teacher.encode_queries([text]), texts.held_out[:TEACHER_QUERIES]),
        table_ms=median_ms(
            lambda text: table.embed(token_ids(teacher, [text])[0]), texts.held_out[:TABLE_QUERIES]
        ),
        seconds=time.perf_counter() - start,
    )


def token_ids(teacher: Encoder, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts as the teacher reads them.

    They include its prompt and special tokens: the rows of these add a constant.
    """
    prompt: Any = teacher.tower.prompt
    return [row.ids for row in prompt.rows(texts)]


def as_table(screened: Sequence[ScreenedTeacher]) -> ReportTable:
    """Build a row per teacher, in their order."""
    head = ("model", "overlap@10", "cosine", "dims", "parameters", "teacher ms", "table ms", "seconds")
    rows = [
        (
            teacher.model,
            f"{teacher.overlap:.3f}",
            f"{teacher.cosine:.3f}",
            f"{teacher.dimensions:,}",
            f"{teacher.parameters / 1e6:.1f} M",
            f"{teacher.teacher_ms:.2f}",
            f"{teacher.table_ms:.3f}",
            f"{teacher.seconds:.0f}",
        )
        for teacher in screened
    ]
    return ReportTable(head, rows)


@dataclass(frozen=True)
class RidgeTable:
    """A vector for each token that occurs; a text's embedding is the unit mean of its tokens' vectors."""

    columns: ndarray
    """Row in `rows` of each token id; -1 for a token that does not occur in the training texts."""
    rows: Float[ndarray, "tokens dim"]

    @classmethod
    def fit(
        cls, texts: Sequence[Sequence[int]], targets: Float[ndarray, "texts dim"], *, ridge: float
    ) -> "RidgeTable":
        """Fit a ridge regression from token shares of texts, each with at least one token, to `targets`."""
        lengths = [len(ids) for ids in texts]
        distinct, places = np.unique(np.concatenate([np.asarray(ids) for ids in texts]), return_inverse=True)
        columns = np.full(int(distinct[-1]) + 1, -1)
        columns[distinct] = np.arange(len(distinct))
        starts, values = np.cumsum([0, *lengths]), np.repeat(1 / np.array(lengths), lengths)
        shares = scipy.sparse.csr_array((values, places, starts), (len(texts), len(distinct)))
        return cls(columns, ridge_fit(shares, targets, ridge=ridge).astype(np.float32))

    def embed(self, ids: Sequence[int]) -> Float[ndarray, " dim"]:
        """Compute the unit embedding of a text; 0 if none of its tokens has a row."""
        id_array = np.asarray(ids)
        rows = self.columns[id_array[id_array < len(self.columns)]]
        vector = self.rows[rows[rows >= 0]].sum(axis=0)
        result: ndarray = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return result


def ridge_fit(
    features: Any, targets: Float[ndarray, "texts dim"], *, ridge: float
) -> Float[ndarray, "tokens dim"]:
    """Compute argmin over W of |features W - targets|^2 + ridge |W|^2, exactly, in float64.

    The normal equations are solved on the smaller side: [texts, texts] or [tokens, tokens].
    """
    texts, tokens = features.shape
    wanted = targets.astype(np.float64)
    if texts < tokens:
        gram = (features @ features.T).toarray()
        gram[np.diag_indices(texts)] += ridge
        return np.asarray(features.T @ scipy.linalg.solve(gram, wanted, assume_a="pos", overwrite_a=True))
    gram = (features.T @ features).toarray()
    gram[np.diag_indices(tokens)] += ridge
    return np.asarray(scipy.linalg.solve(gram, features.T @ wanted, assume_a="pos", overwrite_a=True))
