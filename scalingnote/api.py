"""The Python interface: distil a query tower, build an index, search it. The command line calls it too.

Imports of torch and Ray are late: a table encodes queries only with numpy.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalingnote.core.errors import ArtifactError, ConfigError, explained_imports
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.run.run_index import Index, Result, agreement, mteb_search

if TYPE_CHECKING:
    from scalingnote.run.config import RunConfig
    from scalingnote.storage.artifact import Artifact
    from scalingnote.train.distillation.agreement import Agreement

RECIPES = ("table", "static")
MIN_STEPS = 8  # of a pass over the texts: with fewer texts, batches are smaller
VECTOR_TOKENS = 256  # of a text with a vector: these are documents, while pseudo-queries are sentences
LONG_SHARE = 0.01  # share of texts longer than the model reads, above which all are divided into passages
OVERLAP = 8  # at most 1/8 of a passage is repeated in the next one
EXACT_DOCUMENTS = 10_000  # up to this number, a query is compared with all documents in under a millisecond


def distill(
    model: str | Path | None = None,
    texts: str | Path | None = None,
    *,
    to: str | Path,
    endpoint: str | None = None,
    vectors: str | Path | None = None,
    student: str = "table",
    queries: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    run_dir: str | Path | None = None,
    copy_model: bool = True,
    text_column: str | None = None,
    id_column: str | None = None,
    title_column: str | None = None,
    overrides: Sequence[str] = (),
) -> QueryEncoder:
    """Distil the query side of a published embedding model, only from documents.

    The model still embeds the documents. It also encodes texts sampled from the documents once, and the
    student learns to give the same embeddings. After a kill, the same call resumes.

    Args:
        model: hub id or folder of a model that sentence-transformers reads, or its name at `endpoint`.
        texts: documents: JSON lines, Parquet, fields between tabs, text lines, or a folder or glob of such
            files. The log lists the columns that are read (:mod:`scalingnote.datasets.layouts`).
        to: folder to write, for sentence-transformers and :class:`QueryEncoder`: queries by the student.
        endpoint: URL of OpenAI's ``/v1/embeddings`` or TEI's ``/embed`` that serves the model.
        vectors: texts with vectors of a lost model (Parquet, JSON lines, or .npy with `texts`); `queries`
            then have vectors too.
        student: recipe of the student: "table" (rows of tokens, pairs and end tokens; no neural network) or
            "static" (rows only of tokens, which sentence-transformers reads without our code); or hub id or
            folder of a smaller embedding model, which gets a linear layer into the teacher's space.
        queries: file with real queries to learn from as well (text lines, JSON lines or Parquet).
        count: number of texts to sample from the documents; None takes that of the recipe.
        seed: seed of all sampling and of training.
        run_dir: folder of unfinished work and artifacts; None takes `to` with ".run" appended.
        copy_model: copy the model's document side, if it has files; False refers to `model` by its name.
        text_column: column of texts in the files, if its name is not known, or is ambiguous.
        id_column: column of ids; a row without an id gets its number.
        title_column: column of titles.
        overrides: further settings, in the form of ``--set`` of the command line.

    Returns:
        The student, ready to encode.

    Raises:
        ConfigError: a setting is wrong, or the model's files leave something open.
        DataError: the texts cannot be read, or hold no text.
    """
    with explained_imports():
        config = run_config(
            model, texts, to=to, student=student, queries=queries, count=count, seed=seed, run_dir=run_dir,
            columns=text_columns(text_column, id_column, title_column), overrides=overrides,
            endpoint=endpoint, vectors=vectors,
        )  # fmt: skip
        artifacts = build(config, overrides)
        publish(artifacts, Path(to), model=None if copy_model or endpoint or vectors else str(model))
    return QueryEncoder(to)


def build_index(
    model: str | Path,
    texts: str | Path,
    *,
    run_dir: str | Path,
    endpoint: str | None = None,
    student: str = "table",
    queries: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    text_column: str | None = None,
    id_column: str | None = None,
    title_column: str | None = None,
    overrides: Sequence[str] = (),
) -> "Index":
    """Distil a model's query side like :func:`distill`, and index the documents for hybrid search.

    If more than 1 % of the texts are longer than the model reads, the index holds passages of the texts, and
    a search returns each document once, by its best passage.

    The model and BM25 encode the documents. ``scalingnote search --run RUN_DIR`` and ``scalingnote serve
    --run RUN_DIR`` read the same index. :func:`distill` with the same arguments and `run_dir` publishes its
    query tower without training it again.

    Args:
        model: see :func:`distill`, like all other arguments except `run_dir`.
        texts: documents.
        run_dir: folder of the index and of all artifacts. After a kill, the same call resumes.
        endpoint, student, queries, count, seed, text_column, id_column, title_column, overrides: see there.

    Raises:
        ConfigError: a setting is wrong, or the model's files leave something open.
        DataError: the texts cannot be read, or hold no text.
    """
    with explained_imports():
        config = run_config(
            model, texts, to=run_dir, student=student, queries=queries, count=count, seed=seed,
            run_dir=run_dir, columns=text_columns(text_column, id_column, title_column), overrides=overrides,
            endpoint=endpoint,
        )  # fmt: skip
        build(config, overrides, index=True)
    return Index(run_dir)


def build(
    config: "RunConfig", overrides: Sequence[str] = (), *, index: bool = False
) -> "dict[str, Artifact]":
    """Build the artifacts of :func:`distill` or :func:`build_index`, by kind; finished ones are kept.

    Args:
        config: from :func:`run_config`.
        overrides: settings of the caller; other batches, codes and index settings fit the number of texts.
        index: build the index as well, and record this run, so that :class:`Index` opens it.
    """
    from scalingnote.run import pipeline, stages

    if not any(override.startswith("dataset.passages") for override in overrides):
        config = _divide_long(config)
    texts = "query_embeddings" if config.vectors is not None else "pseudo_queries"
    until = "teacher" if config.vectors is not None else "pseudo_queries"
    inputs = pipeline.run(config, stages.select(config, until=until), record=False)
    counts = inputs[texts].counts
    config = _size_by_texts(
        config,
        texts=counts["queries"] - counts["validation"],
        documents=inputs["dataset"].counts["documents"] if "dataset" in inputs else 0,
        given={override.partition("=")[0] for override in overrides},
        index=index,
    )
    order = stages.select(config, until="index" if index else "distill")
    return pipeline.run(config, order, record=index)


def _divide_long(config: "RunConfig") -> "RunConfig":
    """Add passages to a config if more than LONG_SHARE of the texts are longer than the model reads."""
    from scalingnote.core.log import get_logger
    from scalingnote.datasets.config import Passages
    from scalingnote.datasets.passages import tokenizer_json
    from scalingnote.encode.engines import load_document_prompt
    from scalingnote.encode.lengths import cut_summary, sample_counts
    from scalingnote.run import pipeline, stages

    if config.adopt is None:
        return config
    log, artifacts = (
        get_logger("api"),
        pipeline.run(config, stages.select(config, until="adopt"), record=False),
    )
    counts = sample_counts(artifacts["dataset"], artifacts["dual_encoder"])
    if counts["cut_texts"] <= LONG_SHARE * counts["documents"]:
        return config
    try:
        tokenizer_json(config.adopt.path)
    except ConfigError as error:
        log.warning("%s, and documents are not divided: %s", cut_summary(counts), error)
        return config
    most = load_document_prompt(artifacts["dual_encoder"]).max_tokens
    overlap = most // OVERLAP
    passages = Passages(max_tokens=most, overlap=overlap, tokenizer=config.adopt.path)
    log.info(
        "%s if they are cut: documents are divided into passages of at most %d tokens, with up to %d of the "
        "one before (--set dataset.passages=null cuts them instead)",
        cut_summary(counts),
        most,
        overlap,
    )
    return config.model_copy(update={"dataset": config.dataset.model_copy(update={"passages": passages})})


def _size_by_texts(
    config: "RunConfig", *, texts: int, documents: int, given: set[str], index: bool
) -> "RunConfig":
    """Set the settings that depend on the number of texts and documents, except those in `given`."""
    from scalingnote.encode.config import BM25Config
    from scalingnote.index.config import Flat

    def is_free(name: str) -> bool:
        return not any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.") for one in given)

    sections: dict[str, Any] = {}
    assert config.distill is not None  # every recipe has it
    batch = min(config.distill.global_batch, max(texts // MIN_STEPS, 2))
    if is_free("distill.global_batch"):
        sections["distill"] = config.distill.model_copy(update={"global_batch": batch})
    if index:
        codes = min(config.quantize.codes, max(documents // 4, 2))
        if is_free("quantize.codes"):
            sections["quantize"] = config.quantize.model_copy(update={"codes": codes})
        if is_free("index.shards"):
            sections["index"] = config.index.model_copy(update={"shards": 1})
        if is_free("index.family") and documents <= EXACT_DOCUMENTS:
            sections["index"] = sections.get("index", config.index).model_copy(update={"family": Flat()})
        if is_free("bm25"):
            sections["bm25"] = BM25Config()
    return config.model_copy(update=sections)


def text_columns(text: str | None, doc_id: str | None, title: str | None) -> dict[str, str]:
    """Map our column names to the columns that a caller chose for files of documents."""
    columns = {"content": text, "doc_id": doc_id, "title": title}
    return {ours: column for ours, column in columns.items() if column is not None}


def run_config(
    model: str | Path | None,
    texts: str | Path | None,
    *,
    to: str | Path,
    student: str,
    queries: str | Path | None,
    count: int | None,
    seed: int,
    run_dir: str | Path | None,
    columns: Mapping[str, str],
    overrides: Sequence[str],
    endpoint: str | None = None,
    vectors: str | Path | None = None,
) -> "RunConfig":
    """Build the config of :func:`distill`'s run from recipe, teacher and texts; raise its errors early."""
    from scalingnote.core.config import load
    from scalingnote.datasets.sources import read_texts
    from scalingnote.datasets.vector_job import open_files
    from scalingnote.run.config import RunConfig

    if (model is None) == (vectors is None) or (endpoint and vectors) or (texts or vectors) is None:
        raise ConfigError(
            "a teacher is a model (hub id or folder) with --texts, a model at an endpoint with --texts, or a "
            "file of vectors: give one"
        )
    is_model = student not in RECIPES and ("/" in student or ":" in student or Path(student).is_dir())
    if student not in RECIPES and not is_model:
        raise ConfigError(f"no student {student!r}: choose one of {', '.join(RECIPES)}, or give a model")
    name = "model" if is_model else student
    recipe = resources.files("scalingnote.train.distillation") / "recipes" / f"{name}.yaml"
    values: dict[str, Any] = {
        "run_dir": str(run_dir or f"{to}.run"),
        "dataset.name": "texts",
        "dataset.path": str(texts or vectors),
        "pseudo_queries.seed": seed,
        "distill.seed": seed,
    }
    if vectors is not None:
        values |= _vectors_values(vectors, texts, queries=queries, count=count, columns=columns)
    else:
        teacher = {"adopt.path": str(model)}
        if endpoint is not None:
            teacher = {"endpoint.url": endpoint, "endpoint.model": str(model)}
        values |= teacher
        values |= {} if count is None else {"pseudo_queries.count": count}
        values |= {} if queries is None else {"pseudo_queries.query_log": str(queries)}
    values |= {"distill.tokenizer": "own"} if vectors or endpoint else {}
    values |= {"distill.student.backbone.path": student} if is_model else {}
    values |= {"dataset.columns": json.dumps(columns)} if columns else {}
    with resources.as_file(recipe) as path:
        config = load(RunConfig, [path], [*(f"{name}={value}" for name, value in values.items()), *overrides])
    # Raise errors of unreadable files before any work.
    if config.vectors is not None:
        open_files(config.vectors)
    else:
        next(iter(read_texts(str(texts), columns)), None)
    _check_width(config)
    _check_similarity(config)
    return config


def _vectors_values(
    vectors: str | Path,
    texts: str | Path | None,
    *,
    queries: str | Path | None,
    count: int | None,
    columns: Mapping[str, str],
) -> dict[str, Any]:
    """Return the settings for a teacher that is given as a file of vectors."""
    if count is not None or "doc_id" in columns:
        raise ConfigError(
            "with --vectors the student learns from all texts of the file, and ids are not read: leave "
            "--count and --id-column out"
        )
    files = {"path": vectors, "texts": texts, "queries": queries}
    paths = {f"vectors.{name}": str(file) for name, file in files.items() if file is not None}
    return paths | {"vectors.columns": json.dumps(columns), "distill.student.max_length": VECTOR_TOKENS}


def publish(artifacts: "dict[str, Artifact]", to: Path, *, model: str | None) -> "Agreement":
    """Write the student, and a teacher that has files, to a folder with a card that states their agreement.

    Args:
        artifacts: artifacts by kind, from :func:`build`.
        to: the folder.
        model: name by which the folder refers to the document side; None copies it.

    Returns:
        The agreement of student and teacher.
    """
    from scalingnote.encode.lengths import summary
    from scalingnote.models.card import CardFacts
    from scalingnote.models.publish import write_router
    from scalingnote.train.distillation.agreement import compare

    kinds = ("dataset", "dual_encoder", "query_embeddings", "student", "embeddings")
    comparison = compare(**{kind: artifacts[kind] for kind in kinds if kind in artifacts})
    lessons = artifacts["query_embeddings"]
    endpoint_model = lessons.manifest.config.get("model")  # at an endpoint
    facts = CardFacts(
        lessons=lessons.counts["queries"],
        made=f"The teacher is {endpoint_model}, behind an endpoint." if endpoint_model else None,
        agreement=comparison.measures(),
        lengths=summary(artifacts),
    )
    document = None
    if (towers := artifacts.get("dual_encoder")) is not None:
        path = towers.manifest.config["path"]
        is_hub_id = not Path(path).exists() and ":" not in path
        facts = replace(facts, base_model=path if is_hub_id else None)
        document = towers.directory("document")
    write_router(artifacts["student"].directory("query"), document, to, document_reference=model, facts=facts)
    return comparison


def _check_width(config: "RunConfig") -> None:
    """Raise ConfigError before any work if the student is wider than its teacher."""
    from scalingnote.core.model_files import PACKAGE_PREFIX, local_folder
    from scalingnote.models.adopt import model_path
    from scalingnote.models.config import Pretrained, TowerConfig
    from scalingnote.models.flops import backbone_shape

    if config.adopt is None or config.distill is None or config.distill.teacher_layers is not None:
        return
    student = config.distill.student
    if not isinstance(student, TowerConfig):
        return  # a table has the width of the teacher
    model = model_path(config.adopt, "query")
    if model.startswith(PACKAGE_PREFIX):
        model = str(local_folder(model))
    try:
        width = backbone_shape(student.backbone).hidden
        teacher = backbone_shape(Pretrained(path=model)).hidden
    except ConfigError:  # only the loaded model has the shape
        return
    if width > teacher:
        raise ConfigError(
            f"the student's hidden states have {width} values, those of {model} {teacher}: a query would "
            "cost more than with the teacher. Choose a narrower student"
        )


def _check_similarity(config: "RunConfig") -> None:
    """Raise ConfigError before any work if search does not support the similarity of a model in a folder."""
    from scalingnote.core.model_files import PACKAGE_PREFIX, local_folder
    from scalingnote.models.published_model import similarity_of

    adopt = config.adopt
    if adopt is None or adopt.similarity or adopt.normalise:
        return
    if (
        adopt.path.startswith(PACKAGE_PREFIX) or Path(adopt.path).is_dir()
    ):  # others are checked after the download
        similarity_of(local_folder(adopt.path))


__all__ = [
    "ArtifactError",
    "ConfigError",
    "Index",
    "QueryEncoder",
    "Result",
    "agreement",
    "build_index",
    "distill",
    "mteb_search",
]
