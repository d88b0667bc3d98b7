"""The stages of a run, in their order: what each builds, from what, and the job that does it."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scalingnote.errors import ConfigError
from scalingnote.run_config import RunConfig


@dataclass(frozen=True)
class Stage:
    """One box of the picture: what it builds, from what, and the job that does it.

    It reads the newest artifact of a kind that the stages before it built. What it `may_read` is for
    :func:`of` to say, by the config. One that is not the newest of its kind has a name of its own and
    stands in `by_stage`, with the stage that built it.
    """

    name: str
    builds: str
    reads: tuple[str, ...]
    section: str
    job: str
    may_read: tuple[str, ...] = ()
    by_stage: tuple[tuple[str, str], ...] = ()


STAGES: tuple[Stage, ...] = (
    Stage("prepare", "dataset", (), "dataset", "scalingnote.datasets.job:run"),
    Stage("planner", "planner", ("dataset",), "planner", "scalingnote.planner.job:run"),
    Stage("collect", "triplets", ("dataset", "planner"), "collect", "scalingnote.collect.job:run"),
    Stage("adopt", "dual_encoder", (), "adopt", "scalingnote.adopt.job:run"),
    Stage("train", "dual_encoder", ("dataset", "triplets"), "train", "scalingnote.train.job:run"),
    Stage(
        "pseudo_queries",
        "pseudo_queries",
        ("dataset",),
        "pseudo_queries",
        "scalingnote.pseudo_queries.job:run",
        may_read=("triplets",),
    ),
    Stage(
        "cross_encoder",
        "cross_encoder",
        ("dataset", "triplets"),
        "cross_encoder",
        "scalingnote.cross_encoder.job:run",
    ),
    Stage(
        "teacher",
        "query_embeddings",
        ("dual_encoder",),
        "teacher",
        "scalingnote.encode.job:run_queries",
        may_read=("triplets", "pseudo_queries"),
    ),
    Stage(
        "distill",
        "student",
        ("query_embeddings",),
        "distill",
        "scalingnote.distillation.job:run",
        may_read=("triplets", "embeddings", "dataset"),
    ),
    Stage("encode", "embeddings", ("dataset", "dual_encoder"), "encode", "scalingnote.encode.job:run"),
    Stage(
        "encode_student",
        "embeddings",
        ("dataset", "student"),
        "encode",
        "scalingnote.encode.job:run_student",
    ),
    Stage(
        "mine",
        "triplets",
        ("dataset", "triplets", "dual_encoder", "embeddings"),
        "mine",
        "scalingnote.mine.job:run",
    ),
    Stage("quantize", "semantic_ids", ("embeddings",), "quantize", "scalingnote.quantize.job:run"),
    Stage(
        "fuse",
        "embeddings",
        ("dataset", "planner", "embeddings", "semantic_ids"),
        "fuse",
        "scalingnote.fuse.job:run",
        may_read=("dual_encoder", "student"),
    ),
    Stage("bm25", "bm25_terms", ("dataset",), "bm25", "scalingnote.lexical.job:run"),
    Stage(
        "index",
        "index",
        ("dataset", "embeddings", "semantic_ids"),
        "index",
        "scalingnote.index.job:run",
        may_read=("dual_encoder", "student", "bm25_terms"),
    ),
    Stage(
        "evaluate",
        "report",
        ("dataset", "embeddings", "index"),
        "evaluate",
        "scalingnote.evaluate.job:run",
        may_read=("dual_encoder", "student", "teacher_embeddings", "bm25_terms"),
    ),
)
# What a cross-encoder leaves behind as a teacher: the same artifacts, of the same stages.
OF_CROSS_ENCODER: tuple[Stage, ...] = (
    Stage(
        "teacher",
        "query_embeddings",
        ("dataset", "triplets", "cross_encoder"),
        "teacher",
        "scalingnote.cross_encoder.job:run_queries",
    ),
    Stage(
        "encode",
        "embeddings",
        ("dataset", "cross_encoder"),
        "encode",
        "scalingnote.cross_encoder.job:run_documents",
    ),
)
NAMES = tuple(stage.name for stage in STAGES)
_ROUND = ("train", "encode", "mine")


def of(config: RunConfig) -> list[Stage]:
    """The stages this config asks for, in order: without a distill section there is no student.

    With an adopt section nothing is trained in stage I; triplets and their planner are then built only where
    a student or fusion reads them, and a student that learns from pseudo-queries reads none. With a bm25
    section the index takes its terms from there, whether the document tower has a sparse head or not.
    A round of stage I before the last is ``train@1``, ``encode@1``, ``mine@1``, and so on.
    """
    known = {stage.name: stage for stage in STAGES}
    if config.cross_encoder is not None:
        known |= {stage.name: stage for stage in OF_CROSS_ENCODER}
    earlier = [
        replace(known[name], name=f"{name}@{number}") for number in range(1, config.rounds) for name in _ROUND
    ]
    names = ["prepare", "planner", "collect"]
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


def _reads_triplets(config: RunConfig) -> bool:
    """Whether some stage learns from triplets: stage I, or a student without pseudo-queries to learn from."""
    if config.adopt is None:
        return True
    student = config.distill
    return student is not None and (config.pseudo_queries is None or "triplets" in student.reads)


def _last_round(config: RunConfig, known: Mapping[str, Stage]) -> list[Stage]:
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
    if not config.distill.reads:
        return [top, *pseudo, teacher, distill, known["encode"]]
    again = [known["encode_student"]] if config.distill.document else []
    return [top, *pseudo, teacher, known["encode"], distill, *again]


def _fused(config: RunConfig, known: Mapping[str, Stage]) -> list[Stage]:
    """The stage that merges features in, if any."""
    return [] if config.fuse is None else [_with_query_tower(config, known["fuse"])]


def _with_query_tower(config: RunConfig, stage: Stage, *kinds: str) -> Stage:
    """A stage that reads the query tower that serves, and further kinds."""
    return _reading(stage, "dual_encoder" if config.distill is None else "student", *kinds)


def _reading(stage: Stage, *kinds: str) -> Stage:
    """The stage with these of the kinds that it may read."""
    return replace(stage, reads=(*stage.reads, *kinds), may_read=())


def _evaluate(config: RunConfig, known: Mapping[str, Stage], *kinds: str) -> Stage:
    """Every query tower is measured in the documents' embeddings that it was trained with."""
    stage = known["evaluate"]
    towers = () if config.cross_encoder is not None else ("dual_encoder",)
    students = () if config.distill is None else ("student",)
    own = config.distill is not None and (config.distill.document is not None or config.fuse is not None)
    apart = towers and own
    return replace(
        stage,
        reads=(*stage.reads, *towers, *students, *kinds),
        may_read=(),
        by_stage=(("teacher_embeddings", "encode"),) if apart else (),
    )


def select(
    config: RunConfig, *, only: str | None = None, start: str | None = None, until: str | None = None
) -> list[Stage]:
    """The stages named by ``--only``, ``--from`` and ``--until``."""
    wanted = of(config)
    names = [stage.name for stage in wanted]
    for name in (only, start, until):
        if name is not None and name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no stage {name!r} in this run; it has {', '.join(names)}{hint}")
    if only:
        start = until = only
    first = names.index(start) if start else 0
    last = names.index(until) if until else len(names) - 1
    return wanted[first : last + 1]
