"""The papers' methods on pretrained towers: which trials, in order of worth, and their results.

`python -m benchmarks.reproduce --backbones smollm minilm` runs them. A decoder is SmolLM2's first layers
(benchmarks/smollm.py), an encoder the first layers of all-MiniLM-L6-v2 with its own pooling; `minilm` has all
of MiniLM where methods have a decoder. Both learn by LoRA, for as many steps as two cores allow, from short
texts: BM25, MiniLM as published, and every architecture before training stand beside them for that reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from benchmarks.distillation import Row
from benchmarks.trial import Outcome, Side, Trial

DATASETS = ("feedbackqa", "scifact", "medquad", "stackexchange_devops")
BACKBONES = {"smollm": "smollm", "minilm": "minilm-native"}  # of the command line -> of a trial
SHORT = {"smollm": "SmolLM2", "minilm-native": "MiniLM", "scratch": "random weights"}
STEPS = 60
LADDER = ("embeddistill-one-hot", "embeddistill-scores", "embeddistill-inherit", "embeddistill-matching")
CE = "embeddistill-ce-matching"
# Predicting every token from its state takes most of a step's time on a CPU.
CE_KNOBS = (
    *("cross_encoder.in_batch=1", "cross_encoder.global_batch=16"),
    "cross_encoder.losses.reconstruction=0",
)
PUBLISHED, ZERO_QUERY = "native", "table"
# Backbone, method, whether it is trained, in order of worth: what a table cannot do without comes first.
BY_WORTH: Sequence[tuple[str, str, bool]] = (
    ("minilm-native", PUBLISHED, False),
    ("smollm", "scalingdual", False),
    ("smollm", "scalingdual", True),
    ("smollm", "scalingnote-2l", True),
    ("minilm-native", "twinbert", True),
    ("smollm", "scalingdoc", True),
    ("scratch", CE, True),
    ("smollm", "lookup-qkd-attention", True),
    ("minilm-native", "twinbert", False),
    ("minilm-native", CE, True),
    ("minilm-native", ZERO_QUERY, False),
    ("minilm-native", "scalingdual", True),
    ("minilm-native", "scalingnote-2l", True),
    ("smollm", "scalingdoc", False),
    ("minilm-native", "scalingdoc", True),
    ("smollm", "lightretriever", True),
    *(("minilm-native", name, True) for name in LADDER),
)
LOG_SIZES = (0, 1000, None)  # real queries beside those drawn from documents; None: all there are
PSEUDO_QUERIES = 10_000
# Half the documents of medquad and answers of devops: their corpus is encoded anew in every trial.
KNOBS = {"medquad": ("dataset.max_documents=3000",), "stackexchange_devops": ("dataset.max_documents=3000",)}
Found = Mapping[str, Mapping[str, Row]]  # by dataset: query side, as `label` has it -> its results


# --- trials ------------------------------------------------------------------------------------------------


def trials(
    datasets: Sequence[str], backbones: Sequence[str], *, seeds: int, steps: int | None, knobs: Sequence[str]
) -> list[Trial]:
    """The trials in order of worth: the first seed of every dataset before the second one."""
    chosen = {BACKBONES[name] for name in backbones if name in BACKBONES}
    selection: list[Trial] = []
    for seed, dataset, (backbone, method, trained) in product(range(seeds), datasets, BY_WORTH):
        # A cross-encoder from random weights trains in a minute: beside whatever is chosen.
        if (backbone not in chosen and not (chosen and backbone == "scratch")) or (seed and not trained):
            continue
        if method == ZERO_QUERY:
            logs = LOG_SIZES if dataset == datasets[0] else LOG_SIZES[:1]
            selection += [zero_query(dataset, seed, log=log, knobs=knobs) for log in logs]
        else:
            taken = (steps or STEPS) if trained else 0
            selection.append(trial(dataset, backbone, method, seed, steps=taken, knobs=knobs))
    return selection


def trial(
    dataset: str, backbone: str, method: str, seed: int, *, steps: int, knobs: Sequence[str] = ()
) -> Trial:
    """A method after so many steps; every trial has hybrids with BM25."""
    own = (
        "bm25={}",
        *KNOBS.get(dataset, ()),
        *(CE_KNOBS if method == CE else ()),
        *("distill.global_batch=64", "distill.epochs=3"),
        *knobs,
    )
    return Trial(dataset, backbone, f"methods/{method}", seed, steps, own)


def zero_query(dataset: str, seed: int, *, log: int | None, knobs: Sequence[str] = ()) -> Trial:
    """A table distilled from MiniLM as published, from texts of documents and so many queries of a log."""
    asked = "null" if log is None else log
    own = (f"pseudo_queries.count={PSEUDO_QUERIES}", f"pseudo_queries.train_queries={asked}")
    made = trial(dataset, "minilm-native", ZERO_QUERY, seed, steps=0)
    plain = tuple(knob for knob in made.knobs if not knob.startswith("distill."))
    return Trial(dataset, made.backbone, made.method, seed, 0, (*plain, *own, *knobs))


# --- results ---------------------------------------------------------------------------------------------


def by_dataset(trials: Iterable[Trial], outcomes: Iterable[Outcome]) -> Found:
    """Every query side's results by its label; of a side that several trials report the first is taken."""
    results = {outcome.trial: outcome for outcome in outcomes}
    by_seed: dict[str, dict[str, dict[int, Side]]] = {}
    for one in [one for one in trials if one in results]:
        for name, side in results[one].sides.items():
            seeds = by_seed.setdefault(one.dataset, {}).setdefault(label(one, name), {})
            seeds.setdefault(one.seed, side)
    return {data: {name: Row(seeds) for name, seeds in sides.items()} for data, sides in by_seed.items()}


def label(one: Trial, side: str) -> str:
    """How a query side of a trial is called: `scalingdual, SmolLM2, untrained`."""
    if side == "bm25":
        return side
    name, plus, _ = side.partition(" + bm25")
    words = [name, SHORT[one.backbone]]
    if one.method == f"methods/{ZERO_QUERY}":
        asked = next(knob.split("=")[1] for knob in one.knobs if "train_queries=" in knob)
        words.append("all queries" if asked == "null" else f"{asked} queries")
    elif one.steps == 0 and one.method != f"methods/{PUBLISHED}":
        words.append("untrained")
    return ", ".join(words) + plus
