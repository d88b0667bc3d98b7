"""Trials: train a method on a dataset with a seed, and search exactly with each of its query sides."""

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
}  # by backbone: overrides that put it in place of towers from scratch


@dataclass(frozen=True)
class Trial:
    """One training: `method` is a file of configs/, `steps` are those of stage I (0: no training)."""

    dataset: str
    backbone: str
    method: str
    seed: int
    steps: int
    knobs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Text that is unique to the trial."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Side:
    """Results of one query side, and its speed."""

    measures: dict[str, float]
    success: Float[ndarray, " queries"]  # whether a relevant document is among the first TESTED
    speed: float | None = None  # queries per processor second, one at a time; None: not measured
    gains: Float[ndarray, " queries"] | None = None  # nDCG@10 of each query; None: not in the trial's line


@dataclass(frozen=True)
class Outcome:
    """A finished trial: its query sides by their names in reports."""

    trial: Trial
    sides: dict[str, Side]
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)


def run(trial: Trial, *, run_dir: str) -> Outcome:
    """Train, encode, search; reuse finished artifacts in `run_dir`."""
    started = time.monotonic()
    config = configured(trial, run_dir=run_dir)
    names = [stage.name for stage in stages.of(config)]
    last = names[names.index("quantize") - 1]
    artifacts = pipeline.run(config, stages.select(config, until=last), record=False)
    if config.bm25 is not None:
        artifacts |= pipeline.run(config, stages.select(config, only="bm25"), record=False)
    if "encode_student" in names:
        first = pipeline.run(config, stages.select(config, until="encode"), record=False)
        artifacts["teacher_embeddings"] = first["embeddings"]
    facts = {name: value for name, value in environment().items() if name in KEPT}
    return Outcome(trial, _sides(config, artifacts), time.monotonic() - started, facts)


def configured(trial: Trial, *, run_dir: str) -> RunConfig:
    """Return the config of a trial, with the epochs of stage I for its steps; collect its triplets."""
    plain = unchanged(trial.dataset, trial.method)
    # Short runs stay in this process: the start of Ray's workers would be half of their time.
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
        return config  # a published model: stage I trains nothing
    pipeline.run(config, stages.select(config, until="collect"), record=False)
    return shortened(config, steps=trial.steps)


def shortened(config: RunConfig, *, steps: int) -> RunConfig:
    """Return the config with the epochs of stage I for these steps, in this process; triplets must exist."""
    # Mining loses no row: the old negatives stay if there is no new one.
    triplets = int(pipeline.locate(config.model_copy(update={"rounds": 1}), "triplets").counts["train"])
    # A training takes a minute; the start of Ray's workers would be half of it.
    here = Ranks(workers=0, gpus_per_worker=config.train.resources.gpus_per_worker)
    changes: dict[str, Any] = {}
    for name in ("train", "cross_encoder"):  # a cross-encoder replaces stage I
        if (stage := getattr(config, name)) is not None:
            epochs = steps / (triplets // stage.global_batch)
            changes[name] = stage.model_copy(update={"epochs": epochs, "resources": here})
    return config.model_copy(update=changes)


def _of(knobs: Sequence[str], config: RunConfig) -> list[str]:
    """Return options without those of stage II if the method has no stage II: they would add one."""
    return [knob for knob in knobs if config.distill is not None or not knob.startswith("distill.")]


def unchanged(dataset: str, method: str, knobs: Sequence[str] = ()) -> RunConfig:
    """Load the config of a method on a dataset of the quickstarts or a BEIR folder in $SCALINGNOTE_DATA."""
    file = f"configs/quickstart/{dataset}.yaml"
    if Path(file).exists():
        return load(RunConfig, [file, _method_file(method)], knobs)
    source = f"dataset={{name: beir, path: {beir.folder(dataset)}}}"
    return load(RunConfig, ["configs/quickstart/base.yaml", _method_file(method)], [source, *knobs])


def _method_file(method: str) -> str:
    """Return a method's file: `methods/embeddistill-matching` is a variant of embeddistill.yaml."""
    file, _, variant = method.partition("-")
    own = f"configs/{method}.yaml"
    return own if Path(own).exists() or not variant else f"configs/{file}.yaml:{variant}"


def _sides(config: RunConfig, built: Mapping[str, Artifact]) -> dict[str, Side]:
    """Measure every query side except a student's teacher, which has a separate trial, and stage I's BM25."""
    parents = {kind: artifact for kind, artifact in built.items() if kind in READ}
    test = load_test_set(parents["dataset"])
    texts = list(dict.fromkeys(test.queries))
    embeddings, methods = {}, Methods(config.evaluate, parents)
    for name, kind in methods.towers.items():
        tower = QueryEncoder(parents[kind].directory("query"), threads=1)
        embeddings[name] = QueryEmbeddings(texts, tower.encode_queries(texts))
    bm25 = None if config.distill else retrieval_methods.count_bm25(methods, test.queries, test=test)
    sides = {}
    runs, _ = retrieval_methods.retrieve(methods, embeddings, bm25, test=test)
    names = config.evaluate.names
    for name, rankings in runs.items():
        if config.distill is not None and name in (names.dual_encoder, f"{names.dual_encoder} + bm25"):
            continue
        values = _values(rankings, test)
        measures = {measure: round(float(each.mean()), 5) for measure, each in values.items()}
        speed = None if name == "bm25" else _speed(config, name, parents, test.queries)
        sides[name] = Side(measures, values[f"R@{TESTED}"], speed, values["nDCG@10"])
    return sides


def _values(ranked: trec.Run, test: TestSet) -> Mapping[str, Float[ndarray, " queries"]]:
    """Compute the measures of each query."""
    rankings = {query: [doc for doc, _ in results] for query, results in ranked.items()}
    return per_query(rankings, test.qrels, recall_at=DEPTHS)


def _speed(config: RunConfig, name: str, parents: Mapping[str, Artifact], queries: Sequence[str]) -> float:
    """Measure queries per processor second of this thread, one at a time, from string to embedding, terms."""
    tower, _, how = name.partition(" ")
    kind = Methods(config.evaluate, parents).towers[tower]
    ways: list[Callable[[list[str]], Any]] = []
    if how != "(sparse)":
        with mock.patch.object(torch.cuda, "is_available", return_value=False):  # measure the CPU
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
