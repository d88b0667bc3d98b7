"""Which teacher becomes a good table on these texts? A closed-form fit answers in minutes, without training.

    texts -> pseudo-queries -> teacher: embeddings Y [n, dim], of unit length
                            -> token shares X [n, tokens], sparse
    table W [tokens, dim]: ridge regression on the pseudo-queries of 80 % of the documents
    held-out pseudo-queries: cosine of table and teacher, share of the teacher's top 10 that the table finds

A table that is trained, and on more texts, comes out better than this one. The numbers compare teachers on
one set of texts, and say nothing between sets.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote import tables, topk
from scalingnote.adopt.config import AdoptConfig
from scalingnote.adopt.job import tower
from scalingnote.datasets.intake import subset
from scalingnote.datasets.rows import Row
from scalingnote.distillation.config import ScreenConfig
from scalingnote.distillation.ridge_table import RidgeTable, unit
from scalingnote.encode.encoder import Encoder
from scalingnote.errors import DataError, ScalingNoteError
from scalingnote.log import get_logger
from scalingnote.models.native import local_folder
from scalingnote.pseudo_queries.config import PseudoQueriesConfig
from scalingnote.pseudo_queries.sampling import Document, draw
from scalingnote.storage.exchange import hash_of

log = get_logger("distill")
NEIGHBOURS = 10  # of the teacher's, that the table is to find
LEAST_TEXTS = 100  # distinct pseudo-queries; a fit on fewer says nothing
TIMED_TEACHER, TIMED_TABLE, WARM_UP = 50, 200, 3  # queries of which the time is the median; those before


@dataclass(frozen=True)
class Split:
    """Pseudo-queries to fit on and others, of other documents, to measure with."""

    train: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class Screened:
    """What the fit of one teacher's table says; sizes and times are the teacher's but for `table_ms`."""

    model: str
    overlap: float
    """Share of the teacher's ten nearest training texts that the table finds, mean of the held-out texts."""
    cosine: float
    """Of table and teacher, mean of the held-out texts."""
    dimensions: int
    parameters: int
    tokens: int
    """Distinct tokens of the training texts: rows of the table."""
    teacher_ms: float
    """Median of one query at a time on this machine, text to embedding."""
    table_ms: float
    seconds: float
    """Of the whole screening of this teacher."""


def screen(models: Sequence[str], documents: Iterable[Row], config: ScreenConfig) -> list[Screened]:
    """Fit a table to each teacher; the one that its table follows best comes first.

    Args:
        models: hub ids or folders of published embedding models.
        documents: rows with doc_id, title and content; read once, as many as pseudo-queries are kept.
        config: how many texts, the ridge, the seed.

    Raises:
        DataError: the documents give fewer than :data:`LEAST_TEXTS` distinct pseudo-queries.
        ScalingNoteError: no model could be screened. One that cannot is logged and left out.
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
    done = []
    for model, folder in folders.items():
        try:
            done.append(dataclasses.replace(screen_one(folder, texts, config), model=model))
        except ScalingNoteError as error:
            problems[model] = error
    for model, problem in problems.items():
        log.error("%s is left out: %s", model, problem)
    if not done:
        raise next(iter(problems.values()))
    return sorted(done, key=lambda found: -found.overlap)


def draw_texts(documents: Iterable[Row], config: ScreenConfig) -> Split:
    """Distinct pseudo-queries of a sample of documents; those of some documents are held out.

    DataError where there are too few, or where all are of one document.
    """
    chosen = subset(documents, size=config.count, seed=config.seed, key="doc_id")
    keys = hash_of(pa.array([row["doc_id"] for row in chosen], pa.string())).tolist()
    last = np.random.default_rng(config.seed).permutation(len(chosen))[: round(config.held_out * len(chosen))]
    held_out = set(last.tolist())
    settings = PseudoQueriesConfig(seed=config.seed)
    met: set[str] = set()
    sides: tuple[list[str], list[str]] = ([], [])
    for number, (key, row) in enumerate(zip(keys, chosen, strict=True)):
        document = Document(key, row["title"], row["content"])
        for found in draw(document, settings, per_document=config.count / len(chosen)):
            if found.text.casefold() not in met:
                met.add(found.text.casefold())
                sides[number in held_out].append(found.text)
    if len(met) < LEAST_TEXTS or not all(sides):
        raise DataError(
            f"{len(chosen):,} documents give {len(met):,} distinct pseudo-queries, {len(sides[1]):,} of them "
            f"held out: a fit needs {LEAST_TEXTS} and some held out; give more texts"
        )
    log.info("%d pseudo-queries of %d documents, %d held out", len(met), len(chosen), len(sides[1]))
    return Split(*sides)


def screen_one(model: str, texts: Split, config: ScreenConfig) -> Screened:
    """Encode the texts with a teacher as published, fit its table, and compare the two.

    Raises:
        ConfigError: the model cannot be read.
    """
    start = time.perf_counter()
    teacher = Encoder(tower(AdoptConfig(path=model), "query"))
    train, held_out = (unit(teacher.encode_queries(side)) for side in (texts.train, texts.held_out))
    tokens, held_out_tokens = (token_ids(teacher, side) for side in (texts.train, texts.held_out))
    table = RidgeTable.fit(tokens, train, ridge=config.ridge)
    found = table.embed(held_out_tokens)
    sample = texts.held_out
    return Screened(
        model=model,
        overlap=overlap(held_out, found, train),
        cosine=float((found * held_out).sum(axis=1).mean()),
        dimensions=train.shape[1],
        parameters=sum(parameter.numel() for parameter in teacher.tower.parameters()),
        tokens=len(table.rows),
        teacher_ms=median_ms(lambda text: teacher.encode_queries([text]), sample, count=TIMED_TEACHER),
        table_ms=median_ms(
            lambda text: table.embed_one(token_ids(teacher, [text])[0]), sample, count=TIMED_TABLE
        ),
        seconds=time.perf_counter() - start,
    )


def token_ids(teacher: Encoder, texts: Sequence[str]) -> list[list[int]]:
    """Tokens as the teacher reads them, its prompt and special tokens included: their rows are a constant."""
    prompt: Any = teacher.tower.prompt
    return [row.ids for row in prompt.rows(texts)]


def overlap(
    teacher: Float[ndarray, "texts dim"],
    table: Float[ndarray, "texts dim"],
    searched: Float[ndarray, "docs dim"],
) -> float:
    """Mean share of the teacher's nearest neighbours among `searched` that are the table's as well."""
    _, right = topk.search(teacher, searched, k=NEIGHBOURS)
    _, found = topk.search(table, searched, k=NEIGHBOURS)
    return float((right[:, :, None] == found[:, None, :]).any(axis=2).mean())


def median_ms(function: Callable[[str], object], texts: Sequence[str], *, count: int) -> float:
    """Milliseconds of a call, one text at a time; texts are repeated where there are fewer."""
    given = [texts[number % len(texts)] for number in range(count)]
    for text in given[:WARM_UP]:
        function(text)
    times = []
    for text in given:
        start = time.perf_counter()
        function(text)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def as_table(found: Sequence[Screened]) -> str:
    """Teachers as Markdown, in their order."""
    head = ("model", "overlap@10", "cosine", "dims", "parameters", "teacher ms", "table ms", "seconds")
    rows = [
        (
            one.model,
            f"{one.overlap:.3f}",
            f"{one.cosine:.3f}",
            f"{one.dimensions:,}",
            f"{one.parameters / 1e6:.1f} M",
            f"{one.teacher_ms:.2f}",
            f"{one.table_ms:.3f}",
            f"{one.seconds:.0f}",
        )
        for one in found
    ]
    return tables.markdown(head, rows)
