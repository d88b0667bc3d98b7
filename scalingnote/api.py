"""The Python interface: distil a query tower, load one, search a finished run. The command line calls it too.

Nothing here imports torch or Ray before it is needed: a table encodes queries with numpy alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.encode.query_encoder import QueryEncoder as Tower
from scalingnote.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from scalingnote.run_config import RunConfig
    from scalingnote.storage.artifact import Artifact

RECIPES = ("table", "static", "table-attention", "layers2")


class QueryEncoder:
    """Strings in, embeddings of the teacher's space out.

    Args:
        path: a folder that :func:`distill` wrote, or the query tower of a run.

    Raises:
        ArtifactError: the folder holds no query tower.
    """

    def __init__(self, path: str | Path) -> None:
        self._tower = Tower.load(Path(path))

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        return self._tower.dim

    def encode(
        self, queries: str | Sequence[str], *, normalize: bool = True
    ) -> Float32[ndarray, "queries dim"]:
        """Embeddings of queries, in their order.

        Args:
            queries: one text or several; an empty text has an embedding, too.
            normalize: make every embedding of length 1, as documents are searched by cosine.

        Returns:
            float32, a row per query; one row for a single text.
        """
        texts = [queries] if isinstance(queries, str) else list(queries)
        found = np.asarray(self._tower.encode_queries(texts), np.float32)
        if normalize:
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found


def distill(
    model: str | Path,
    texts: str | Path,
    *,
    to: str | Path,
    student: str = "table",
    queries: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    run_dir: str | Path | None = None,
    copy_model: bool = True,
    overrides: Sequence[str] = (),
) -> QueryEncoder:
    """Distil the query side of a published embedding model, from documents alone.

    The documents' embeddings stay the model's own. Texts drawn from the documents are encoded by the model
    once, and the student learns to give the same embeddings. Killed at any moment, the same call goes on.

    Args:
        model: hub id or folder of an embedding model that sentence-transformers reads.
        texts: documents: JSON lines or Parquet (`content` or `text`, optional `title`), text lines, or a BEIR
            folder.
        to: folder to write: one model for sentence-transformers and :class:`QueryEncoder`, whose query side
            is the student.
        student: recipe of the student: "table" (rows of tokens, pairs and end tokens; no neural network),
            "static" (rows of tokens alone, which sentence-transformers reads without our code),
            "table-attention" (one head over the table's rows), "layers2" (first and last of six layers).
        queries: file with real queries to learn from as well (text lines, JSON lines or Parquet).
        count: texts to draw from the documents; None takes the recipe's.
        seed: of every draw.
        run_dir: where unfinished work and artifacts lie; None takes `to` with ".run" behind it.
        copy_model: copy the model's document side into `to`; False refers to `model` by its name.
        overrides: further settings, as ``--set`` of the command line takes them.

    Returns:
        The student, ready to encode.

    Raises:
        ConfigError: a setting is wrong, or the model's files leave something open.
        DataError: the texts cannot be read, or hold no text.
    """
    config = run_config(
        model, texts, to=to, student=student, queries=queries, count=count, seed=seed, run_dir=run_dir,
        overrides=overrides,
    )  # fmt: skip
    built = build(config)
    publish(built, Path(to), model=None if copy_model else str(model))
    return QueryEncoder(to)


def build(config: "RunConfig") -> "dict[str, Artifact]":
    """The artifacts of :func:`distill`, by kind, from its :func:`run_config`; finished ones are kept."""
    from scalingnote import pipeline, stages

    return pipeline.run(config, stages.select(config, until="distill"), record=False)


def run_config(
    model: str | Path,
    texts: str | Path,
    *,
    to: str | Path,
    student: str,
    queries: str | Path | None,
    count: int | None,
    seed: int,
    run_dir: str | Path | None,
    overrides: Sequence[str],
) -> "RunConfig":
    """The config of :func:`distill`'s run: a recipe, the model and the texts, which are looked at first."""
    from scalingnote.config import load
    from scalingnote.run_config import RunConfig

    _check_texts(texts)
    if student not in RECIPES:
        raise ConfigError(f"no student {student!r}: choose one of {', '.join(RECIPES)}")
    recipe = resources.files("scalingnote.distillation") / "recipes" / f"{student}.yaml"
    values: dict[str, Any] = {
        "run_dir": str(run_dir or f"{to}.run"),
        "dataset.name": "texts",
        "dataset.path": str(texts),
        "adopt.path": str(model),
        "pseudo_queries.seed": seed,
        "distill.seed": seed,
    }
    values |= {} if count is None else {"pseudo_queries.count": count}
    values |= {} if queries is None else {"pseudo_queries.query_log": str(queries)}
    with resources.as_file(recipe) as path:
        return load(RunConfig, [path], [*(f"{name}={value}" for name, value in values.items()), *overrides])


def publish(
    built: "dict[str, Artifact]", to: Path, *, model: str | None, agreement: Mapping[str, float] | None = None
) -> None:
    """Write the student and its teacher as one folder.

    `model` refers to the document side by its name; None copies it. The model card tells of `agreement`.
    """
    from scalingnote.models.card import CardFacts
    from scalingnote.models.publish import write_router

    path = built["dual_encoder"].manifest.config["path"]
    is_hub_id = not Path(path).exists() and ":" not in path
    facts = CardFacts(
        base_model=path if is_hub_id else None,
        lessons=built["query_embeddings"].counts["queries"],
        agreement=dict(agreement or {}),
    )
    query, document = built["student"].directory("query"), built["dual_encoder"].directory("document")
    write_router(query, document, to, document_reference=model, facts=facts)


def _check_texts(texts: str | Path) -> None:
    """DataError, before work is spent, for texts that no stage could read."""
    from scalingnote.datasets.sources import read_texts

    next(iter(read_texts(texts)), None)


@dataclass(frozen=True)
class Result:
    """A document that a search found."""

    doc_id: str
    score: float
    title: str
    snippet: str


class Index:
    """The index of a finished run, open for searches in this process.

    Args:
        run_dir: a run that `scalingnote run CONFIG` finished.

    Raises:
        ConfigError: there is no run.
        ArtifactError: the run built no index.
    """

    def __init__(self, run_dir: str | Path) -> None:
        from scalingnote import pipeline
        from scalingnote.search.searcher import Searcher

        config = pipeline.load_run(str(run_dir))
        tower = pipeline.locate(config, "student" if config.distill else "dual_encoder")
        self.encoder = QueryEncoder(tower.directory("query"))
        self._searcher: Searcher = Searcher.open(pipeline.locate(config, "index").uri)

    def search(self, query: str, *, k: int = 10) -> list[Result]:
        """The `k` best documents by the embeddings' cosine, best first; ConfigError for an empty query."""
        if not query.strip() or k < 1:
            raise ConfigError("nothing to search: give some text and k of at least 1")
        found = self._searcher.search(self.encoder.encode(query), k=k)[0]
        results = []
        for hit in found:
            document = self._searcher.document(hit)
            results.append(Result(hit.doc_id, float(hit.score), document["title"], document["snippet"]))
        return results


__all__ = ["ArtifactError", "ConfigError", "Index", "QueryEncoder", "Result", "distill"]
