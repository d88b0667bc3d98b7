"""A trial: a method is trained on a dataset with a seed; every query side it gives is searched exactly."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from jaxtyping import Float
from numpy import ndarray

from benchmarks import beir, minilm, public_sets, smollm
from scalingnote.core.config import load
from scalingnote.core.log import environment
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate import retrieval_methods
from scalingnote.evaluate.measures import per_query
from scalingnote.evaluate.retrieval_methods import Methods
from scalingnote.evaluate.test_set import QueryEmbeddings, TestSet, load_test_set
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact
from scalingnote.train.config import Ranks

DEPTHS = (1, 5, 10, 20, 50, 100)
TESTED = 50  # depth of the success that t-tests compare
CPU_SECONDS = 1.0  # of timing a query side
READ = ("dataset", "embeddings", "dual_encoder", "student", "teacher_embeddings", "bm25_terms")
KEPT = ("python", "torch", "transformers", "processor", "cpus")
TEACHERS: dict[str, Callable[[RunConfig], list[str]]] = {
    "minilm": minilm.overrides,
    "minilm-native": minilm.native_overrides,
    "smollm": smollm.overrides,
    "smollm-30": partial(smollm.overrides, layers=smollm.ALL_LAYERS),
    "smollm-gpu": partial(smollm.overrides, layers=smollm.ALL_LAYERS, sizes=minilm.GPU),
}  # by backbone: what puts it in place of towers from scratch


@dataclass(frozen=True)
class Trial:
    """One training: `method` is a file of configs/, `steps` are those of stage I, 0 leaves it untrained."""

    dataset: str
    backbone: str
    method: str
    seed: int
    steps: int
    knobs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What distinguishes it from all others."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Side:
    """What one query side finds, and what a query costs."""

    measures: dict[str, float]
    success: Float[ndarray, " queries"]  # whether a relevant document is among the first TESTED
    speed: float | None = None  # queries per processor second, one at a time; None: not ours to time
    gains: Float[ndarray, " queries"] | None = None  # nDCG@10 of each query; None: of a line without them


@dataclass(frozen=True)
class Outcome:
    """A finished trial: its query sides by their names in reports."""

    trial: Trial
    sides: dict[str, Side]
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)


def run(trial: Trial, *, run_dir: str) -> Outcome:
    """Train, encode, search; what is finished in `run_dir` is not built again."""
    started = time.monotonic()
    config = configured(trial, run_dir=run_dir)
    names = [stage.name for stage in stages.of(config)]
    last = names[names.index("quantize") - 1]
    built = pipeline.run(config, stages.select(config, until=last), record=False)
    if config.bm25 is not None:
        built |= pipeline.run(config, stages.select(config, only="bm25"), record=False)
    if "encode_student" in names:
        first = pipeline.run(config, stages.select(config, until="encode"), record=False)
        built["teacher_embeddings"] = first["embeddings"]
    kept = {name: value for name, value in environment().items() if name in KEPT}
    return Outcome(trial, _sides(config, built), time.monotonic() - started, kept)


def configured(trial: Trial, *, run_dir: str) -> RunConfig:
    """The config of a trial, with as many epochs of stage I as give its steps; collects its triplets."""
    plain = unchanged(trial.dataset, trial.method)
    # Short runs in this process: half of their time would be the start of Ray's workers.
    knobs = [f"run_dir={run_dir}", f"train.seed={trial.seed}"]
    knobs += [f"{stage}.resources.workers=1" for stage in ("encode", "teacher")]
    if plain.distill is not None:
        knobs += [f"distill.seed={trial.seed}", "distill.resources.workers=0"]
        knobs.append(f"teacher.tokens={json.dumps(plain.distill.reads_tokens)}")
    if plain.pseudo_queries is not None:
        knobs.append(f"pseudo_queries.seed={trial.seed}")
    if plain.cross_encoder is not None:
        knobs.append(f"cross_encoder.seed={trial.seed}")
    if trial.backbone in TEACHERS:
        knobs += TEACHERS[trial.backbone](plain)
    config = unchanged(trial.dataset, trial.method, [*knobs, *_of(trial.knobs, plain)])
    public_sets.prepare_for(config.dataset)
    if config.adopt is not None:
        return config  # as published: nothing is trained in stage I
    pipeline.run(config, stages.select(config, until="collect"), record=False)
    return shortened(config, steps=trial.steps)


def shortened(config: RunConfig, *, steps: int) -> RunConfig:
    """The same with epochs of stage I that give these steps, in this process; triplets are collected."""
    # Mining loses no row here: the old negatives stay if no new one is found.
    triplets = int(pipeline.locate(config.model_copy(update={"rounds": 1}), "triplets").counts["train"])
    # A training takes a minute: half of it would be the start of Ray's workers.
    here = Ranks(workers=0, gpus_per_worker=config.train.resources.gpus_per_worker)
    changed: dict[str, Any] = {}
    for name in ("train", "cross_encoder"):  # which is trained in stage I's place
        if (stage := getattr(config, name)) is not None:
            epochs = steps / (triplets // stage.global_batch)
            changed[name] = stage.model_copy(update={"epochs": epochs, "resources": here})
    return config.model_copy(update=changed)


def _of(knobs: Sequence[str], config: RunConfig) -> list[str]:
    """Return options without those of stage II if a method has none: they would give it one."""
    return [knob for knob in knobs if config.distill is not None or not knob.startswith("distill.")]


def unchanged(dataset: str, method: str, knobs: Sequence[str] = ()) -> RunConfig:
    """The config of a method on a dataset: one of the quickstarts', or a BEIR folder in $SCALINGNOTE_DATA."""
    own = f"configs/quickstart/{dataset}.yaml"
    if Path(own).exists():
        return load(RunConfig, [own, _method_file(method)], knobs)
    source = f"dataset={{name: beir, path: {beir.folder(dataset)}}}"
    return load(RunConfig, ["configs/quickstart/base.yaml", _method_file(method)], [source, *knobs])


def _method_file(method: str) -> str:
    """`methods/embeddistill-matching` is a variant of embeddistill.yaml, others have a file of their own."""
    file, _, variant = method.partition("-")
    own = f"configs/{method}.yaml"
    return own if Path(own).exists() or not variant else f"configs/{file}.yaml:{variant}"


def _sides(config: RunConfig, built: Mapping[str, Artifact]) -> dict[str, Side]:
    """Every query side but a student's teacher, which has its own trial, and BM25 of stage I."""
    parents = {kind: artifact for kind, artifact in built.items() if kind in READ}
    test = load_test_set(parents["dataset"])
    texts = list(dict.fromkeys(test.queries))
    encoded, methods = {}, Methods(config.evaluate, parents)
    for name, kind in methods.towers.items():
        tower = QueryEncoder(parents[kind].directory("query"), threads=1)
        encoded[name] = QueryEmbeddings(texts, tower.encode_queries(texts))
    bm25 = None if config.distill else retrieval_methods.count_bm25(methods, test.queries, test=test)
    found = {}
    runs, _ = retrieval_methods.retrieve(methods, encoded, bm25, test=test)
    names = config.evaluate.names
    for name, ranked in runs.items():
        if config.distill is not None and name in (names.dual_encoder, f"{names.dual_encoder} + bm25"):
            continue
        values = _values(ranked, test)
        measures = {measure: round(float(each.mean()), 5) for measure, each in values.items()}
        speed = None if name == "bm25" else _speed(config, name, parents, test.queries)
        found[name] = Side(measures, values[f"R@{TESTED}"], speed, values["nDCG@10"])
    return found


def _values(ranked: trec.Run, test: TestSet) -> Mapping[str, Float[ndarray, " queries"]]:
    """Each query's measures."""
    rankings = {query: [doc for doc, _ in results] for query, results in ranked.items()}
    return per_query(rankings, test.qrels, recall_at=DEPTHS)


def _speed(config: RunConfig, name: str, parents: Mapping[str, Artifact], queries: Sequence[str]) -> float:
    """Queries per processor second of this thread, one at a time: string in, embedding and terms out."""
    tower, _, how = name.partition(" ")
    kind = Methods(config.evaluate, parents).towers[tower]
    ways: list[Callable[[list[str]], Any]] = []
    if how != "(sparse)":
        with mock.patch.object(torch.cuda, "is_available", return_value=False):  # a processor's seconds
            ways.append(QueryEncoder(parents[kind].directory("query"), threads=1).encode_queries)
    of_terms = {
        "(sparse)": "dual_encoder",
        "(hybrid)": "dual_encoder",
        "(raw hybrid)": "dual_encoder",
        "+ bm25": "bm25_terms",
    }
    if how in of_terms:
        ways.append(SparseQuery.load(parents[of_terms[how]].directory("sparse_query")).encode)
    for query in queries[:20]:
        for way in ways:
            way([query])
    start, count = time.process_time(), 0
    while time.process_time() - start < CPU_SECONDS:
        for way in ways:
            way([queries[count % len(queries)]])
        count += 1
    return count / (time.process_time() - start)
