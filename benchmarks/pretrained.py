"""The papers' methods on pretrained towers: which trials, in order of worth, and their results.

    --backbones smollm minilm m3e       on two cores: SmolLM2's first layers, short texts, few steps
    --backbones smollm-gpu minilm-gpu   on a GPU: all of SmolLM2, whole corpora, longer texts, more steps

of `python -m benchmarks.reproduce`. A decoder is SmolLM2-135M (benchmarks/smollm.py), an encoder the first
layers of all-MiniLM-L6-v2 with its own pooling; `minilm` has all of MiniLM where methods have a decoder, and
`m3e` a small encoder of Chinese (benchmarks/m3e.py). All learn by LoRA. BM25, the published models, and every
architecture before training stand beside them.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product

from benchmarks.distillation import LIGHTRETRIEVER, Row
from benchmarks.trial import Outcome, Side, Trial

# Datasets of whose trials those of ESSENTIAL are enough, with the model of their language.
BRIEF = {"nfcorpus": "minilm", "zh_reading_titles": "m3e", "zh_medical_qa": "m3e"}
DATASETS = ("feedbackqa", "scifact", "medquad", "stackexchange_devops", *BRIEF)
FIRST = DATASETS[0]  # the dataset of attempts and of query logs
# Of the command line -> of a trial.
BACKBONES = {
    "smollm": "smollm",
    "minilm": "minilm-native",
    "m3e": "m3e",
    "smollm-gpu": "smollm-gpu",
    "minilm-gpu": "minilm-gpu",
}
ON_GPU = "-gpu"
SHORT = {"smollm": "SmolLM2", "minilm": "MiniLM", "m3e": "M3E", "scratch": "random weights"}
STEPS, GPU_STEPS = 60, 200
LADDER = ("embeddistill-one-hot", "embeddistill-scores", "embeddistill-inherit", "embeddistill-matching")
CE, CE_SCORES = "embeddistill-ce-matching", "embeddistill-ce-scores"
# Four layers of LightRetriever find nothing with these losses and 60 steps; others have what learns of its
# sparse half. Its dense half learns where the sparse losses do not drown it: see docs/results/pretrained.md.
LEARNING_ATTEMPT = "all layers, FLOPs 1e-5"
# Without the reconstruction loss, which the paper's cross-encoder needs: predicting every token from its
# state takes most of a step's time on a CPU.
CE_KNOBS = (
    *("cross_encoder.in_batch=1", "cross_encoder.global_batch=16"),
    "cross_encoder.losses.reconstruction=0",
)
PUBLISHED, ZERO_QUERY = "native", "table"
# Backbone, method, whether it is trained, in order of worth: what a table cannot do without comes first.
BY_WORTH: Sequence[tuple[str, str, bool]] = (
    ("minilm", PUBLISHED, False),
    ("smollm", "scalingdual", False),
    ("smollm", "scalingdual", True),
    ("smollm", "scalingnote-2l", True),
    ("minilm", "twinbert", True),
    ("smollm", "scalingdoc", True),
    ("scratch", CE, True),
    ("smollm", "lookup-qkd-attention", True),
    ("minilm", "twinbert", False),
    ("minilm", CE, True),
    ("minilm", ZERO_QUERY, False),
    ("minilm", "scalingdual", True),
    ("minilm", "scalingnote-2l", True),
    ("smollm", "scalingdoc", False),
    ("minilm", "scalingdoc", True),
    ("smollm", LIGHTRETRIEVER, False),
    ("smollm", LIGHTRETRIEVER, True),
    *(("minilm", name, True) for name in LADDER),
    ("minilm", CE_SCORES, True),
)
ESSENTIAL: Sequence[tuple[str, bool]] = (
    *((PUBLISHED, False), (ZERO_QUERY, False), ("scalingdual", True)),
    *(("scalingnote-2l", True), ("twinbert", True), ("scalingdoc", True)),
)
COSINE = ("distill.losses.qkd=0", "distill.losses.cosine=1")
# What was tried where a method stayed far behind the paper's: by backbone, method, whether it is trained.
ATTEMPTS: Mapping[tuple[str, str, bool], Mapping[str, Sequence[str]]] = {
    ("smollm", "scalingnote-2l", True): {
        "QKD at 3e-4": ("distill.optimizer.peak_lr=3e-4",),
        "QKD at 1e-2": ("distill.optimizer.peak_lr=1e-2",),
        "cosine at 3e-4": (*COSINE, "distill.optimizer.peak_lr=3e-4"),
        "cosine at 1e-3": (*COSINE, "distill.optimizer.peak_lr=1e-3"),
        "ten passes": ("distill.epochs=10",),
    },
    ("smollm", LIGHTRETRIEVER, False): {"all layers": ("train.document.backbone.layers=null",)},
    ("smollm", LIGHTRETRIEVER, True): {
        LEARNING_ATTEMPT: (
            *("train.document.backbone.layers=null", "train.precision=bfloat16"),
            *("train.optimizer.peak_lr=2e-4", "train.sparse.flops=1e-5"),
        )
    },
    ("minilm", CE, True): {"all layers": ("cross_encoder.backbone.layers=null",)},
}
LOG_SIZES = (0, 1000, None)  # real queries beside those drawn from documents; None: all there are
# With all of its documents this dataset has 12,963 queries to learn from; no other has 10,000.
LARGE_LOG, LARGE_LOG_SIZES = "medquad", (0, 1000, 10_000)
WHOLE = "dataset.max_documents=null"
# By backbone: a word of English alone says more than a Chinese character.
PSEUDO_QUERIES = {"minilm-native": 10_000, "minilm-gpu": 10_000, "m3e": 100_000}
# About half of their documents: a corpus is encoded anew in every trial.
KNOBS = dict.fromkeys(("medquad", "stackexchange_devops", "zh_medical_qa"), ("dataset.max_documents=3000",))
Found = Mapping[str, Mapping[str, Row]]  # by dataset: query side, as `label` has it -> its results


# --- trials ------------------------------------------------------------------------------------------------


def trials(
    datasets: Sequence[str], backbones: Sequence[str], *, seeds: int, steps: int | None, knobs: Sequence[str]
) -> list[Trial]:
    """The trials in order of worth: the first seed of every dataset before the second one."""
    selection: list[Trial] = []
    for gpu, usual in (("", STEPS), (ON_GPU, GPU_STEPS)):
        chosen = {name.removesuffix(ON_GPU) for name in backbones if name.endswith(ON_GPU) == bool(gpu)}
        chosen -= {"scratch"}
        if chosen and not gpu:  # a cross-encoder from random weights trains in a minute: beside whatever is
            chosen.add("scratch")
        rows = [
            (seed, dataset, row) for seed, dataset in product(range(seeds), datasets) for row in of(dataset)
        ]
        for seed, dataset, row in rows:
            backbone, method, trained = row
            if backbone not in chosen or (seed and not trained):
                continue
            named = BACKBONES.get(f"{backbone}{gpu}", backbone)
            if method == ZERO_QUERY:
                logs = LOG_SIZES if dataset == FIRST else LOG_SIZES[:1]
                selection += [zero_query(dataset, seed, log=log, backbone=named, knobs=knobs) for log in logs]
                continue
            one = partial(trial, dataset, named, method, seed, steps=(steps or usual) if trained else 0)
            variants = _variants(row, dataset, seed, gpu=bool(gpu))
            selection += [one(knobs=(*knobs, *variant)) for variant in variants]
        if "minilm" in chosen and not gpu and LARGE_LOG in datasets:
            selection += large_log(knobs)
    return sorted(selection, key=lambda one: one.seed)


def _variants(row: tuple[str, str, bool], dataset: str, seed: int, *, gpu: bool) -> Sequence[Sequence[str]]:
    """Knobs of each trial of a row: none, and of attempts. They are made once, on the first dataset."""
    attempts = ATTEMPTS.get(row, {})
    if dataset == FIRST and not seed:
        return [(), *attempts.values()]
    if row[1] == LIGHTRETRIEVER and not gpu:
        return [] if seed else [knobs for said, knobs in attempts.items() if said == LEARNING_ATTEMPT]
    return [()]


def large_log(knobs: Sequence[str]) -> list[Trial]:
    """Tables distilled with up to as many real queries as a dataset has with all of its documents."""
    every = (*knobs, WHOLE)
    tables = [zero_query(LARGE_LOG, 0, log=log, knobs=every) for log in LARGE_LOG_SIZES]
    return [trial(LARGE_LOG, BACKBONES["minilm"], PUBLISHED, 0, steps=0, knobs=every), *tables]


def of(dataset: str) -> Sequence[tuple[str, str, bool]]:
    """Backbone, method, whether it is trained, in order of worth."""
    return [(BRIEF[dataset], *row) for row in ESSENTIAL] if dataset in BRIEF else BY_WORTH


def trial(
    dataset: str, backbone: str, method: str, seed: int, *, steps: int, knobs: Sequence[str] = ()
) -> Trial:
    """A method after so many steps; every trial has hybrids with BM25."""
    gpu = backbone.endswith(ON_GPU)
    own = (
        "bm25={}",
        *(() if gpu else KNOBS.get(dataset, ())),
        *(CE_KNOBS if method in (CE, CE_SCORES) and not gpu else ()),
        *("distill.global_batch=64", f"distill.epochs={10 if gpu else 3}"),
        *knobs,
    )
    return Trial(dataset, backbone, f"methods/{method}", seed, steps, own)


def zero_query(
    dataset: str,
    seed: int,
    *,
    log: int | None,
    backbone: str = BACKBONES["minilm"],
    knobs: Sequence[str] = (),
) -> Trial:
    """A table distilled from a model as published, from texts of documents and so many queries of a log."""
    asked = "null" if log is None else log
    own = (f"pseudo_queries.count={PSEUDO_QUERIES[backbone]}", f"pseudo_queries.train_queries={asked}")
    made = trial(dataset, backbone, ZERO_QUERY, seed, steps=0)
    plain = tuple(knob for knob in made.knobs if not knob.startswith("distill."))
    return Trial(dataset, made.backbone, made.method, seed, 0, (*plain, *own, *knobs))


# --- results ---------------------------------------------------------------------------------------------


def by_dataset(trials: Iterable[Trial], outcomes: Iterable[Outcome]) -> Found:
    """Every query side's results by its label; of a side that several trials report the first is taken."""
    results = {outcome.trial: outcome for outcome in outcomes}
    by_seed: dict[str, dict[str, dict[int, Side]]] = {}
    for one in [one for one in trials if one in results]:
        for name, side in results[one].sides.items():
            seeds = by_seed.setdefault(data_of(one), {}).setdefault(label(one, name), {})
            seeds.setdefault(one.seed, side)
    return {data: {name: Row(seeds) for name, seeds in sides.items()} for data, sides in by_seed.items()}


def data_of(one: Trial) -> str:
    """What tables call a trial's data: trials on a GPU read whole corpora and longer texts."""
    if one.backbone.endswith(ON_GPU):
        return f"{one.dataset}, GPU"
    return f"{one.dataset}, all documents" if WHOLE in one.knobs else one.dataset


def label(one: Trial, side: str) -> str:
    """How a query side of a trial is called: `scalingdual, SmolLM2, untrained`."""
    if side == "bm25":
        return side
    name, plus, _ = side.partition(" + bm25")
    backbone, method = one.backbone.split("-")[0], one.method.removeprefix("methods/")
    words = [name, SHORT[backbone]]
    own = trial(one.dataset, one.backbone, method, one.seed, steps=one.steps).knobs
    added = one.knobs[len(own) :]
    attempts = ATTEMPTS.get((backbone, method, one.steps > 0), {})
    tried = {knobs: said for said, knobs in attempts.items() if added[-len(knobs) :] == tuple(knobs)}
    if tried:
        words.append(tried[max(tried, key=len)])  # the others are a part of it
    if one.method == f"methods/{ZERO_QUERY}":
        asked = next(knob.split("=")[1] for knob in one.knobs if "train_queries=" in knob)
        words.append("all queries" if asked == "null" else f"{asked} queries")
    elif one.steps == 0 and one.method != f"methods/{PUBLISHED}":
        words.append("untrained")
    return ", ".join(words) + plus
