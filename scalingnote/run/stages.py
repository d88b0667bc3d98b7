"""The stages of a run, in their order: the artifact that each builds, its inputs, and its job.

The command line, jobs/ and the pipeline follow this table.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalingnote.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # the command line reads the table without a config
    from scalingnote.run.config import RunConfig
    from scalingnote.storage.artifact import Artifact


@dataclass(frozen=True)
class Stage:
    """A step of a run.

    Attributes:
        name: name of its command, its job and its folder in `run_dir`.
        summary: description for ``--help``.
        builds: kind of its artifact.
        job: the function that does the work, ``module:function`` below `scalingnote`.
        reads: kinds of artifacts that it takes; :func:`of` adds those that a config needs. Of each kind it
            gets the newest that an earlier stage built.
        earlier: artifacts that are not the newest of their kind: name of the argument, and builder.
        section: its section of the config; by default its name.
    """

    name: str
    summary: str
    builds: str
    job: str
    reads: tuple[str, ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()
    section: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "section", self.section or self.name)

    def function(self) -> Callable[..., "Artifact"]:
        """Import and return the function of `job`; the import is late, because many jobs need torch."""
        module, name = self.job.split(":")
        function: Callable[..., Artifact] = getattr(importlib.import_module(f"scalingnote.{module}"), name)
        return function


PREPARE = Stage(
    "prepare",
    "read a dataset into documents, queries and qrels",
    "dataset",
    "datasets.job:run",
    section="dataset",
)
PLANNER = Stage(
    "planner",
    "learn the importance of the words of a query",
    "planner",
    "triplets.planner.job:run",
    ("dataset",),
)
COLLECT = Stage(
    "collect",
    "turn clicks and rankings into training triplets",
    "triplets",
    "triplets.collect.job:run",
    ("dataset", "planner"),
)
ADOPT = Stage(
    "adopt",
    "take a published embedding model as the dual encoder, instead of stage I",
    "dual_encoder",
    "models.adopt:run",
)
TRAIN = Stage("train", "stage I: train both towers", "dual_encoder", "train.job:run", ("dataset", "triplets"))
PSEUDO_QUERIES_STAGE = Stage(
    "pseudo_queries",
    "sample texts from the documents, for a student to learn from",
    "pseudo_queries",
    "triplets.pseudo_queries.job:run",
    ("dataset",),
)
CROSS_ENCODER = Stage(
    "cross_encoder",
    "train a dual-pooled cross-encoder as the teacher, instead of stage I",
    "cross_encoder",
    "train.cross_encoder.job:run",
    ("dataset", "triplets"),
)
TEACHER = Stage(
    "teacher",
    "embed the training queries with the teacher",
    "query_embeddings",
    "encode.job:run_queries",
    ("dual_encoder",),
)
DISTILL = Stage(
    "distill",
    "stage II: train the small query tower on those embeddings",
    "student",
    "train.distillation.job:run",
    ("query_embeddings",),
)
ENCODE = Stage("encode", "embed the documents", "embeddings", "encode.job:run", ("dataset", "dual_encoder"))
ENCODE_STUDENT = Stage(
    "encode_student",
    "embed the documents with a student that has a document tower",
    "embeddings",
    "encode.job:run_student",
    ("dataset", "student"),
    section="encode",
)
MINE = Stage(
    "mine",
    "find fresh hard negatives with the trained towers",
    "triplets",
    "triplets.mine.job:run",
    ("dataset", "triplets", "dual_encoder", "embeddings"),
)
QUANTIZE = Stage(
    "quantize", "assign semantic IDs by residual K-means", "semantic_ids", "quantize.job:run", ("embeddings",)
)
FUSE = Stage(
    "fuse",
    "merge features, clicks and users into the final embeddings",
    "embeddings",
    "fuse.job:run",
    ("dataset", "planner", "embeddings", "semantic_ids"),
)
BM25_STAGE = Stage(
    "bm25",
    "weight the words of the documents by BM25, for hybrid search",
    "bm25_terms",
    "encode.lexical.job:run",
    ("dataset",),
)
INDEX = Stage(
    "index", "build the sharded index", "index", "index.job:run", ("dataset", "embeddings", "semantic_ids")
)
EVALUATE = Stage(
    "evaluate",
    "measure and write the report",
    "report",
    "evaluate.job:run",
    ("dataset", "embeddings", "index"),
)
RUN_STAGES = (
    PREPARE,
    PLANNER,
    COLLECT,
    ADOPT,
    TRAIN,
    PSEUDO_QUERIES_STAGE,
    CROSS_ENCODER,
    TEACHER,
    DISTILL,
    ENCODE,
    ENCODE_STUDENT,
    MINE,
    QUANTIZE,
    FUSE,
    BM25_STAGE,
    INDEX,
    EVALUATE,
)
# A cross-encoder as the teacher builds the same artifacts in stages of the same names.
CROSS_TEACHER = replace(
    TEACHER, reads=("dataset", "triplets", "cross_encoder"), job="train.cross_encoder.job:run_queries"
)
CROSS_ENCODE = replace(
    ENCODE, reads=("dataset", "cross_encoder"), job="train.cross_encoder.job:run_documents"
)
# A teacher that gives only vectors: answers of an endpoint, or a file.
ENDPOINT_TEACHER = replace(
    TEACHER, reads=("pseudo_queries",), job="encode.endpoint:run_queries", section="endpoint"
)
ENDPOINT_ENCODE = replace(ENCODE, reads=("dataset",), job="encode.endpoint:run_documents", section="endpoint")
VECTORS_TEACHER = replace(TEACHER, reads=(), job="datasets.vector_job:run", section="vectors")
NAMES = tuple(stage.name for stage in RUN_STAGES)


def of(config: "RunConfig") -> list[Stage]:
    """Return the stages of a config, in order; without a distill section there is no student.

    With an adopt section, stage I trains nothing. Then triplets are built only if a student reads them, and
    their planner only if a student or fusion does; a student that learns from pseudo-queries reads no
    triplets. With an endpoint section, the endpoint replaces the towers. With a vectors section, there is
    only a student. With a bm25 section, the index takes its terms from there, even if the document tower has
    a sparse head. A round of stage I before the last is ``train@1``, ``encode@1``, ``mine@1``, and so on.
    """
    if config.vectors is not None:
        return [VECTORS_TEACHER, DISTILL]
    earlier = [
        replace(stage, name=f"{stage.name}@{number}")
        for number in range(1, config.rounds)
        for stage in (TRAIN, ENCODE, MINE)
    ]
    # Without triplets, only fusion needs the planner: it weights the words of a query.
    with_planner = config.reads_triplets or config.fuse is not None
    tower = config.query_tower_kind
    terms = () if config.bm25 is None else ("bm25_terms",)
    return [
        PREPARE,
        *([PLANNER] if with_planner else []),
        *([COLLECT] if config.reads_triplets else []),
        *earlier,
        *_last_round(config, ("triplets",) if config.reads_triplets else ()),
        QUANTIZE,
        *([] if config.fuse is None else [_reading(FUSE, tower)]),
        *([] if config.bm25 is None else [BM25_STAGE]),
        _reading(INDEX, tower, *terms),
        _evaluate(config, *terms),
    ]


def _last_round(config: "RunConfig", triplets: tuple[str, ...]) -> list[Stage]:
    """Return the stages of the teacher, and of a student; `triplets` is empty if the run collects none."""
    trainer = TRAIN if config.cross_encoder is None else CROSS_ENCODER
    top = trainer if config.adopt is None else ADOPT
    encode = ENCODE if config.cross_encoder is None else CROSS_ENCODE
    if config.distill is None:
        return [top, encode]
    pseudo = [] if config.pseudo_queries is None else [_reading(PSEUDO_QUERIES_STAGE, *triplets)]
    if config.endpoint is not None:
        return [*pseudo, ENDPOINT_TEACHER, DISTILL, ENDPOINT_ENCODE]
    texts = ("pseudo_queries",) if pseudo else ()
    teacher = CROSS_TEACHER if config.cross_encoder is not None else _reading(TEACHER, *triplets, *texts)
    distill = _reading(DISTILL, *config.distill.reads)
    # QKD needs only query embeddings: the student is ready before the slowest stage, encode, begins.
    if not config.distill.reads:
        return [top, *pseudo, teacher, distill, encode]
    # The document tower of a student replaces the teacher's embeddings in the index.
    again = [ENCODE_STUDENT] if config.distill.document else []
    return [top, *pseudo, teacher, encode, distill, *again]


def _reading(stage: Stage, *kinds: str) -> Stage:
    return replace(stage, reads=(*stage.reads, *kinds))


def _evaluate(config: "RunConfig", *terms: str) -> Stage:
    """Build the stage evaluate: it measures each query tower with the document embeddings of its training."""
    is_tower = config.cross_encoder is None and config.endpoint is None
    towers = ("dual_encoder",) if is_tower else ()
    students = () if config.distill is None else ("student",)
    is_replaced = config.distill is not None and (
        config.distill.document is not None or config.fuse is not None
    )
    # The teacher searches its embeddings of the documents, which are not the newest then.
    earlier = (("teacher_embeddings", "encode"),) if towers and is_replaced else ()
    return replace(_reading(EVALUATE, *towers, *students, *terms), earlier=earlier)


def select(
    config: "RunConfig", *, only: str | None = None, start: str | None = None, until: str | None = None
) -> list[Stage]:
    """Select the stages given by ``--only``, ``--from`` and ``--until``.

    Raises:
        ConfigError: the run has no such stage.
    """
    order = of(config)
    names = [stage.name for stage in order]
    for name in (only, start, until):
        if name is not None and name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"no stage {name!r} in this run; it has {', '.join(names)}{hint}")
    if only:
        start = until = only
    first = names.index(start) if start else 0
    last = names.index(until) if until else len(names) - 1
    return order[first : last + 1]
