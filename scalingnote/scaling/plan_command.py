"""`scalingnote plan`: reads its options, prints the plan. Loads argparse alone until it runs."""

import argparse
from pathlib import Path

# Option -> metavar and help; the knobs of PlanConfig, whose descriptions need pydantic.
NEEDED = {
    "documents": ("N", "documents of the corpus, e.g. 2e9"),
    "tokens": ("N", "mean tokens of a document, its prompt counted in"),
    "model": ("NAME", "backbone of both towers: a published name, or a folder with config.json"),
    "qps": ("N", "queries a second at the peak"),
}
CORPUS = {
    "recall": ("R", "of the exact 100 best documents, default: 0.95"),
    "query_tokens": ("N", "mean tokens of a query, default: 16"),
    "dims": ("N", "Matryoshka dimensions, the last one indexed, default: 16 32 64 128"),
    "query_tower": ("KIND", "bert-int8 (the default) or lookup"),
    "pairs": ("N", "training pairs, default: 1e8"),
    "negatives": ("N", "hard negatives of a pair, default: 1"),
    "lora": ("RANK", "train adapters, default: all weights"),
    "distill_epochs": ("N", "passes over the pairs' queries, default: 100"),
}
MACHINES = {
    "gpu": ("KIND", "H200, H100 (the default), A100, L40S or L4"),
    "gpus": ("N", "that work at the same time, default: 8"),
    "mfu": ("SHARE", "of the peak that is reached, default: 0.4"),
    "node_memory": ("GB", "sizes of searchers' nodes, default: 64 128 256 512 1024"),
    "replicas": ("N", "copies of everything that serves, at least, default: 2"),
}
PRICES = {
    "gpu_price": ("USD", "of a GPU hour, default: by kind"),
    "core_price": ("USD", "of a CPU core's hour, default: 0.03"),
    "memory_price": ("USD", "of a GB of memory for an hour, default: 0.004"),
    "storage_price": ("USD", "of a GB in object storage for a month, default: 0.023"),
}
TEXT, MANY = ("model", "gpu", "query_tower"), ("dims", "node_memory")


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    groups = (("needed", NEEDED), ("corpus and model", CORPUS), ("machines", MACHINES), ("prices", PRICES))
    for title, options in groups:
        group = parser.add_argument_group(title)
        for name, (metavar, text) in options.items():
            group.add_argument(
                f"--{name.replace('_', '-')}",
                type=str if name in TEXT else float,
                nargs="+" if name in MANY else None,
                required=title == "needed",
                metavar=metavar,
                help=text,
            )
    parser.add_argument("--explain", action="store_true", help="then every step and every constant's source")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, steps and constants too")


def run(options: argparse.Namespace) -> int:
    """Plan and print; ConfigError for knobs out of bounds and models that are not known."""
    from scalingnote.config import validate
    from scalingnote.scaling import capacity, plan_table
    from scalingnote.scaling.config import PlanConfig

    given = {
        name: value
        for name in (*NEEDED, *CORPUS, *MACHINES, *PRICES)
        if (value := getattr(options, name)) is not None
    }
    plan = capacity.plan(validate(PlanConfig, given, source="plan"))
    print(plan_table.text(plan))
    if options.explain:
        print(f"\n{plan_table.explained(plan)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(f"{plan_table.as_json(plan)}\n", encoding="utf-8")
        print(f"\n{options.json}")
    return 0
