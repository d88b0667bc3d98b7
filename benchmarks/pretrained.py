"""The papers' methods on pretrained towers: which trials, in order of worth, and what they gave.

`python -m benchmarks.reproduce --backbones smollm minilm` runs them. A decoder is SmolLM2's first layers
(benchmarks/smollm.py), an encoder the first layers of all-MiniLM-L6-v2 with its own pooling; `minilm` has all
of MiniLM where methods have a decoder. Both learn by LoRA, for as many steps as two cores allow, from short
texts: BM25, MiniLM as published, and every architecture before training stand beside them for that reason.
"""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.distillation import Row
from benchmarks.trial import Outcome, Side, Trial

DATASETS = ("feedbackqa", "scifact", "medquad", "stackexchange_devops")
BACKBONES = {"smollm": "smollm", "minilm": "minilm-native"}  # of the command line -> of a trial
SHORT = {"smollm": "SmolLM2", "minilm-native": "MiniLM"}
STEPS = 60
STUDENTS = ("scalingnote-2l", "lookup-qkd-attention")
LADDER = ("embeddistill-one-hot", "embeddistill-scores", "embeddistill-inherit", "embeddistill-matching")
CE = "embeddistill-ce-matching"
PUBLISHED, ZERO_QUERY = "native", "table"
FIRST, NEXT = 0, 1  # worth of a trial
# In order: what a table cannot do without first. Untrained towers have 0 steps.
WANTED: Sequence[tuple[int, str, str, bool]] = (
    (FIRST, "minilm-native", PUBLISHED, False),
    (FIRST, "smollm", "scalingdual", False),
    (FIRST, "smollm", "scalingdual", True),
    (FIRST, "smollm", "scalingnote-2l", True),
    (FIRST, "minilm-native", "twinbert", False),
    (FIRST, "minilm-native", "twinbert", True),
    (FIRST, "smollm", "scalingdoc", True),
    (FIRST, "smollm", "lookup-qkd-attention", True),
    (FIRST, "minilm-native", "scalingdual", True),
    (FIRST, "minilm-native", "scalingnote-2l", True),
    (FIRST, "minilm-native", "scalingdoc", True),
    (FIRST, "smollm", "scalingdoc", False),
    (NEXT, "minilm-native", CE, True),
    (NEXT, "smollm", "lightretriever", True),
    *((NEXT, "minilm-native", name, True) for name in LADDER),
)
LOGS = (0, 1000, None)  # real queries beside those drawn from documents; None: all there are
PSEUDO = 20_000
# Half the documents of medquad and answers of devops: their corpus is encoded anew in every trial.
KNOBS = {"medquad": ("dataset.max_documents=3000",), "stackexchange_devops": ("dataset.max_documents=3000",)}
Found = Mapping[str, Mapping[str, Row]]  # by dataset: query side, as `label` has it -> what it gave


# --- trials ------------------------------------------------------------------------------------------------


def trials(
    datasets: Sequence[str], backbones: Sequence[str], *, seeds: int, steps: int | None, knobs: Sequence[str]
) -> list[Trial]:
    """All that are wanted, those first that tell most: every dataset's first seed before the second one."""
    chosen = {BACKBONES[name] for name in backbones if name in BACKBONES}
    made = []
    for seed in range(seeds):
        for worth in (FIRST, NEXT):
            for dataset in datasets:
                made += [
                    trial(dataset, backbone, method, seed, steps=(steps or STEPS) * trained, knobs=knobs)
                    for each, backbone, method, trained in WANTED
                    if each == worth and backbone in chosen and (seed == 0 or trained)
                ]
                if worth == FIRST and "minilm-native" in chosen and dataset == datasets[0]:
                    made += [zero_query(dataset, seed, log=log, knobs=knobs) for log in LOGS]
    return made


def trial(
    dataset: str, backbone: str, method: str, seed: int, *, steps: int, knobs: Sequence[str] = ()
) -> Trial:
    """A method after so many steps; every trial has hybrids with BM25."""
    own = (
        "bm25={}",
        *KNOBS.get(dataset, ()),
        *("distill.global_batch=64", "distill.epochs=3"),
        *knobs,
    )
    return Trial(dataset, backbone, f"methods/{method}", seed, steps, own)


def zero_query(dataset: str, seed: int, *, log: int | None, knobs: Sequence[str] = ()) -> Trial:
    """A table distilled from MiniLM as published, from texts of documents and so many queries of a log."""
    asked = "null" if log is None else log
    own = (f"pseudo_queries.count={PSEUDO}", f"pseudo_queries.train_queries={asked}")
    made = trial(dataset, "minilm-native", ZERO_QUERY, seed, steps=0)
    plain = tuple(knob for knob in made.knobs if not knob.startswith("distill."))
    return Trial(dataset, made.backbone, made.method, seed, 0, (*plain, *own, *knobs))


# --- what they gave ----------------------------------------------------------------------------------------


def by_dataset(wanted: Iterable[Trial], outcomes: Iterable[Outcome]) -> Found:
    """What every query side gave, by its label; of a side that several trials report the first is taken."""
    done = {outcome.trial: outcome for outcome in outcomes}
    found: dict[str, dict[str, dict[int, Side]]] = {}
    for one in [one for one in wanted if one in done]:
        for name, side in done[one].sides.items():
            of_side = found.setdefault(one.dataset, {}).setdefault(label(one, name), {})
            of_side.setdefault(one.seed, side)
    return {data: {name: Row(seeds) for name, seeds in sides.items()} for data, sides in found.items()}


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
