"""The stages of a run, in their order: what each builds, from what, and the job that does it.

The command line, jobs/ and the pipeline follow this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalingnote.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # the command line reads the table before any config is needed
    from scalingnote.run_config import RunConfig


@dataclass(frozen=True)
class Stage:
    """A step of a run.

    Attributes:
        name: of its command, its job and its folder in `run_dir`.
        summary: what it does, for ``--help``.
        builds: kind of its artifact.
        job: the function that does the work, ``module:function``.
        reads: kinds of artifacts that it takes. Of each kind it gets the newest that a stage before it built.
        may_read: further kinds that it takes in some configs; :func:`of` moves those to `reads`.
        earlier: artifacts that are not the newest of their kind: the argument's name and the builder.
        section: its section of the config; the stage's name where it is left out.
    """

    name: str
    summary: str
    builds: str
    job: str
    reads: tuple[str, ...] = ()
    may_read: tuple[str, ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()
    section: str = ""

    def __post_init__(self) -> None:
        if not self.section:
            object.__setattr__(self, "section", self.name)


STAGES: tuple[Stage, ...] = (
    Stage(
        "prepare",
        "read a dataset into documents, queries and qrels",
        builds="dataset",
        job="scalingnote.datasets.job:run",
        section="dataset",
    ),
    Stage(
        "planner",
        "learn which words of a query matter",
        builds="planner",
        job="scalingnote.planner.job:run",
        reads=("dataset",),
    ),
    Stage(
        "collect",
        "turn clicks and rankings into training triplets",
        builds="triplets",
        job="scalingnote.collect.job:run",
        reads=("dataset", "planner"),
    ),
    Stage(
        "adopt",
        "take a published embedding model as the dual encoder, in stage I's place",
        builds="dual_encoder",
        job="scalingnote.adopt.job:run",
    ),
    Stage(
        "train",
        "stage I: train both towers",
        builds="dual_encoder",
        job="scalingnote.train.job:run",
        reads=("dataset", "triplets"),
    ),
    Stage(
        "pseudo_queries",
        "draw texts from the documents for a student to learn from",
        builds="pseudo_queries",
        job="scalingnote.pseudo_queries.job:run",
        reads=("dataset",),
        may_read=("triplets",),
    ),
    Stage(
        "cross_encoder",
        "train a dual-pooled cross-encoder, a teacher in stage I's place",
        builds="cross_encoder",
        job="scalingnote.cross_encoder.job:run",
        reads=("dataset", "triplets"),
    ),
    Stage(
        "teacher",
        "embed the training queries with the teacher",
        builds="query_embeddings",
        job="scalingnote.encode.job:run_queries",
        reads=("dual_encoder",),
        may_read=("triplets", "pseudo_queries"),
    ),
    Stage(
        "distill",
        "stage II: train the small query tower on those embeddings",
        builds="student",
        job="scalingnote.distillation.job:run",
        reads=("query_embeddings",),
        may_read=("triplets", "embeddings", "dataset"),
    ),
    Stage(
        "encode",
        "embed the documents",
        builds="embeddings",
        job="scalingnote.encode.job:run",
        reads=("dataset", "dual_encoder"),
    ),
    Stage(
        "encode_student",
        "embed the documents with a student that has a document tower",
        builds="embeddings",
        job="scalingnote.encode.job:run_student",
        reads=("dataset", "student"),
        section="encode",
    ),
    Stage(
        "mine",
        "find fresh hard negatives with the trained towers",
        builds="triplets",
        job="scalingnote.mine.job:run",
        reads=("dataset", "triplets", "dual_encoder", "embeddings"),
    ),
    Stage(
        "quantize",
        "assign semantic IDs by residual K-means",
        builds="semantic_ids",
        job="scalingnote.quantize.job:run",
        reads=("embeddings",),
    ),
    Stage(
        "fuse",
        "merge features, clicks and users into the final embeddings",
        builds="embeddings",
        job="scalingnote.fuse.job:run",
        reads=("dataset", "planner", "embeddings", "semantic_ids"),
        may_read=("dual_encoder", "student"),
    ),
    Stage(
        "bm25",
        "weight the documents' words by BM25, for hybrid search",
        builds="bm25_terms",
        job="scalingnote.lexical.job:run",
        reads=("dataset",),
    ),
    Stage(
        "index",
        "build the sharded index",
        builds="index",
        job="scalingnote.index.job:run",
        reads=("dataset", "embeddings", "semantic_ids"),
        may_read=("dual_encoder", "student", "bm25_terms"),
    ),
    Stage(
        "evaluate",
        "measure and write the report",
        builds="report",
        job="scalingnote.evaluate.job:run",
        reads=("dataset", "embeddings", "index"),
        may_read=("dual_encoder", "student", "teacher_embeddings", "bm25_terms"),
    ),
)
# A cross-encoder as the teacher builds the same artifacts in stages of the same names.
CROSS_ENCODER_STAGES: tuple[Stage, ...] = (
    Stage(
        "teacher",
        "embed the training queries with the teacher",
        builds="query_embeddings",
        job="scalingnote.cross_encoder.job:run_queries",
        reads=("dataset", "triplets", "cross_encoder"),
    ),
    Stage(
        "encode",
        "embed the documents",
        builds="embeddings",
        job="scalingnote.cross_encoder.job:run_documents",
        reads=("dataset", "cross_encoder"),
    ),
)
NAMES = tuple(stage.name for stage in STAGES)
# Stages that a round of stage I repeats; collect runs once.
_ROUND = ("train", "encode", "mine")


def of(config: "RunConfig") -> list[Stage]:
    """The stages this config asks for, in order: without a distill section there is no student.

    With an adopt section nothing is trained in stage I; triplets and their planner are then built only where
    a student or fusion reads them, and a student that learns from pseudo-queries reads none. With a bm25
    section the index takes its terms from there, whether the document tower has a sparse head or not.
    A round of stage I before the last is ``train@1``, ``encode@1``, ``mine@1``, and so on.
    """
    known = {stage.name: stage for stage in STAGES}
    if config.cross_encoder is not None:
        known |= {stage.name: stage for stage in CROSS_ENCODER_STAGES}
    earlier = [
        replace(known[name], name=f"{name}@{number}") for number in range(1, config.rounds) for name in _ROUND
    ]
    names = ["prepare", "planner", "collect"]
    # Without triplets the planner is needed by fusion alone, which weighs the words of a query.
    if not _reads_triplets(config):
        names = ["prepare", "planner"] if config.fuse is not None else ["prepare"]
    words = [] if config.bm25 is None else [known["bm25"]]
    terms = [stage.builds for stage in words]
    return [
        *(known[name] for name in names),
        *earlier,
        *_last_round(config, known),
        known["quantize"],
        *_fused(config, known),
        *words,
        _with_query_tower(config, known["index"], *terms),
        _evaluate(config, known, *terms),
    ]


def _reads_triplets(config: "RunConfig") -> bool:
    """Whether some stage learns from triplets: stage I, or a student without pseudo-queries to learn from."""
    if config.adopt is None:
        return True
    student = config.distill
    return student is not None and (config.pseudo_queries is None or "triplets" in student.reads)


def _last_round(config: "RunConfig", known: Mapping[str, Stage]) -> list[Stage]:
    """The teacher, and the student if there is one."""
    trained = "train" if config.cross_encoder is None else "cross_encoder"
    top = known["adopt" if config.adopt is not None else trained]
    if config.distill is None:
        return [top, known["encode"]]
    triplets = ("triplets",) if _reads_triplets(config) else ()
    pseudo = [] if config.pseudo_queries is None else [_reading(known["pseudo_queries"], *triplets)]
    texts = ("pseudo_queries",) if pseudo else ()
    teacher = known["teacher"]
    if config.cross_encoder is None:
        teacher = _reading(teacher, *triplets, *texts)
    distill = _reading(known["distill"], *config.distill.reads)
    # QKD needs query embeddings only: the student is ready before the slowest stage, encode, begins.
    if not config.distill.reads:
        return [top, *pseudo, teacher, distill, known["encode"]]
    # A student's own document tower replaces the teacher's embeddings in the index.
    again = [known["encode_student"]] if config.distill.document else []
    return [top, *pseudo, teacher, known["encode"], distill, *again]


def _fused(config: "RunConfig", known: Mapping[str, Stage]) -> list[Stage]:
    """The stage that merges features in, if any."""
    return [] if config.fuse is None else [_with_query_tower(config, known["fuse"])]


def _with_query_tower(config: "RunConfig", stage: Stage, *kinds: str) -> Stage:
    """A stage that reads the query tower that serves, and further kinds."""
    return _reading(stage, "dual_encoder" if config.distill is None else "student", *kinds)


def _reading(stage: Stage, *kinds: str) -> Stage:
    """The stage with these of the kinds that it may read."""
    return replace(stage, reads=(*stage.reads, *kinds), may_read=())


def _evaluate(config: "RunConfig", known: Mapping[str, Stage], *kinds: str) -> Stage:
    """Every query tower is measured in the documents' embeddings that it was trained with."""
    stage = known["evaluate"]
    towers = () if config.cross_encoder is not None else ("dual_encoder",)
    students = () if config.distill is None else ("student",)
    own = config.distill is not None and (config.distill.document is not None or config.fuse is not None)
    # The teacher searches its own documents, which are not the newest embeddings then.
    apart = towers and own
    return replace(
        stage,
        reads=(*stage.reads, *towers, *students, *kinds),
        may_read=(),
        earlier=(("teacher_embeddings", "encode"),) if apart else (),
    )


def select(
    config: "RunConfig", *, only: str | None = None, start: str | None = None, until: str | None = None
) -> list[Stage]:
    """The stages named by ``--only``, ``--from`` and ``--until``."""
    wanted = of(config)
    names = [stage.name for stage in wanted]
    for name in (only, start, until):
        if name is not None and name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"no stage {name!r} in this run; it has {', '.join(names)}{hint}")
    if only:
        start = until = only
    first = names.index(start) if start else 0
    last = names.index(until) if until else len(names) - 1
    return wanted[first : last + 1]
