"""`scalingnote`: the command line. Each command reads its arguments and calls the room that does the work.

Only argparse is loaded before a command is chosen, so `--help` answers at once.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalingnote import __version__
from scalingnote.errors import ConfigError, ScalingNoteError
from scalingnote.scaling import plan_command

if TYPE_CHECKING:
    from scalingnote.pipeline import RunConfig

STAGES = {
    "prepare": "read a dataset into documents, queries and qrels",
    "planner": "learn which words of a query matter",
    "collect": "turn clicks and rankings into training triplets",
    "train": "stage I: train both towers",
    "cross_encoder": "train a dual-pooled cross-encoder, a teacher in stage I's place",
    "teacher": "embed the training queries with the teacher",
    "distill": "stage II: train the small query tower on those embeddings",
    "encode": "embed the documents",
    "encode_student": "embed the documents with a student that has a document tower",
    "mine": "find fresh hard negatives with the trained towers",
    "quantize": "assign semantic IDs by residual K-means",
    "fuse": "merge features, clicks and users into the final embeddings",
    "index": "build the sharded index",
    "evaluate": "measure and write the report",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 not fit, 2 wrong input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except ScalingNoteError as error:
        if os.environ.get("SCALINGNOTE_DEBUG") == "1":
            raise
        # Ray wraps an error of a remote task together with its traceback; the cause is the error itself.
        print(f"scalingnote: {getattr(error, 'cause', error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `scalingnote datasets list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("scalingnote", description="Train, index and serve dual encoders.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(command=function, name=name)
        return made

    run = command("run", _run, "run the stages of a config, skipping finished ones")
    _add_config(run)
    which = run.add_mutually_exclusive_group()
    which.add_argument("--only", metavar="STAGE", help="run this stage alone")
    which.add_argument("--from", metavar="STAGE", dest="start", help="run from this stage on")
    run.add_argument("--until", metavar="STAGE", help="stop after this stage")
    run.add_argument("--serve", action="store_true", help="then serve what was built, until CTRL-C")
    for name, text in STAGES.items():
        stage = command(name, _run, text)
        _add_config(stage)
        stage.set_defaults(only=name, start=None, until=None, serve=False)
        if name == "train":
            _add_dry_run(stage)

    compare = command(
        "compare", _compare, "run several methods on one dataset and lay their reports together"
    )
    _add_config(compare)
    compare.add_argument("--methods", nargs="+", required=True, metavar="FILE", help="one config per method")

    search = command("search", _search, "search a finished run from the shell, without a server")
    search.add_argument("query", help="what to look for")
    search.add_argument("--run", default="runs/quickstart", metavar="DIR", help="default: %(default)s")
    search.add_argument("--form", default="auto", help="of the query tower: onnx_int8, torch, ...")
    search.add_argument("-k", type=int, default=5, help="number of results, default: %(default)s")

    ids = command("ids", _ids, "show the documents of a finished run whose semantic ID begins so")
    ids.add_argument("prefix", nargs="?", default="", help="codes, e.g. 12-7; none: all documents")
    ids.add_argument("--run", default="runs/quickstart", metavar="DIR", help="default: %(default)s")
    ids.add_argument("-k", type=int, default=10, help="documents and next codes, default: %(default)s")

    serve = command("serve", _serve, "serve a finished run: HTTP and a search page on one URL")
    serve.add_argument("--run", default="runs/quickstart", metavar="DIR", help="default: %(default)s")
    _add_set(serve)

    export = command("export", _export, "write a run's query tower as an ONNX graph, checked on real queries")
    export.add_argument("--run", default="runs/quickstart", metavar="DIR", help="default: %(default)s")
    export.add_argument(
        "--form", choices=("onnx_int8", "onnx"), default="onnx_int8", help="default: %(default)s"
    )

    ingest = command("ingest", _ingest, "encode, code and fuse new documents as a run did its own")
    ingest.add_argument("file", help="JSON lines or Parquet: doc_id, title, topic, content, features")
    ingest.add_argument("--run", default="runs/quickstart", metavar="DIR", help="default: %(default)s")
    ingest.add_argument(
        "--column", action="append", default=[], metavar="OURS=THEIRS", help="a column's name in the file"
    )
    _add_set(ingest)

    experiment = command("experiment", _experiment, "compare the arms of an experiment, from access logs")
    _add_config(experiment)

    ladder = command("ladder", _ladder, "train stage I at several sizes and fit the scaling laws")
    _add_config(ladder)

    publish = command("publish", _publish, "copy a run's towers out, each a folder with a model card")
    publish.add_argument("folder", help="where they go: dual_encoder/query, dual_encoder/document, ...")
    publish.add_argument("--run", default="runs/quickstart", metavar="DIR", help="default: %(default)s")

    submit = command("submit", _submit, "send one stage to a Ray cluster as a job")
    submit.add_argument("stage", type=_stage, metavar="STAGE", help=", ".join(STAGES) + "; train@1: round 1")
    _add_config(submit)
    submit.add_argument("--address", required=True, metavar="URL", help="e.g. http://head-node:8265")
    submit.add_argument("--submission-id", metavar="ID", help="refused if used before: submits once")
    submit.add_argument("--wait", action="store_true", help="follow the log, end with the job's exit code")

    datasets = command("datasets", _datasets, "list, describe or download the datasets")
    datasets.add_argument("action", choices=("list", "describe", "fetch"))
    datasets.add_argument("dataset", nargs="?", metavar="NAME")

    plan_command.add(command("plan", plan_command.run, "turn a corpus into GPU hours, machines and money"))

    doctor = command("doctor", _doctor, "check this machine and say what to do about each finding")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def _stage(name: str) -> str:
    if name.partition("@")[0] not in STAGES:
        raise argparse.ArgumentTypeError(f"no stage {name!r}; choose from {', '.join(STAGES)}")
    return name


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="+", metavar="CONFIG", help="YAML files, later ones laid over earlier"
    )
    _add_set(parser)


def _add_dry_run(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--dry-run", action="store_true", help="print memory per GPU, arithmetic and days; start nothing"
    )
    dry = train.add_argument_group("with --dry-run")
    dry.add_argument("--gpu", metavar="KIND", help="H200, H100 (the default), A100, L40S or L4")
    dry.add_argument("--gpus", type=int, metavar="N", help="default: train.resources.workers")
    dry.add_argument("--mfu", metavar="SHARE", help="of the peak that is reached, default: 0.4")
    dry.add_argument("--network", metavar="GB/S", help="in and out of a node, default: 400")
    dry.add_argument("--rows", metavar="N", help="training rows, default: those that were collected")
    dry.add_argument("--query-tokens", metavar="N", help="mean length, default: the longest")
    dry.add_argument("--document-tokens", metavar="N", help="mean length, default: the longest")
    train.set_defaults(command=_train)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        dest="overrides",
        help="override one knob; repeatable",
    )


def _load(options: argparse.Namespace, *more: str) -> "RunConfig":
    from scalingnote.config import load
    from scalingnote.log import configure
    from scalingnote.pipeline import RunConfig

    configure()
    return load(RunConfig, [*options.config, *more], options.overrides)


def _run(options: argparse.Namespace) -> int:
    config = _load(options)
    from scalingnote import pipeline

    chosen = pipeline.select(config, only=options.only, start=options.start, until=options.until)
    built = pipeline.run(config, chosen)
    if "report" in built:
        from scalingnote.evaluate.merge import merge
        from scalingnote.evaluate.report import comparison_table

        print(comparison_table(merge([built["report"]])))
    width = max(len(kind) for kind in built)
    for kind, artifact in built.items():
        print(f"{kind:<{width}}  {artifact.uri}")
    if "report" in built:
        print(f"\nreport: {config.run_dir}/report.html\ntry it: scalingnote serve --run {config.run_dir}")
    return _serve_run(config.run_dir, options.overrides) if options.serve else 0


def _train(options: argparse.Namespace) -> int:
    names = ("gpu", "mfu", "network", "rows", "query_tokens", "document_tokens")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if not options.dry_run:
        if given or options.gpus is not None:
            raise ConfigError("hardware and sizes are assumed in a dry run only: add --dry-run")
        return _run(options)
    if options.gpus is not None:
        options.overrides = [*options.overrides, f"train.resources.workers={options.gpus}"]
    config = _load(options)
    from scalingnote.config import validate
    from scalingnote.scaling import dry_run, table
    from scalingnote.scaling.config import Assumptions

    # A round of stage I after the first learns from mined negatives.
    given["negatives"] = (config.mine if config.rounds > 1 else config.collect).num_negatives
    assumed = validate(Assumptions, given, source="--dry-run")
    if assumed.rows is None:
        assumed = assumed.model_copy(update={"rows": _training_rows(config)})
    print(table.text(dry_run.estimate(config.train, assumed)))
    return 0


def _training_rows(config: "RunConfig") -> int | None:
    """How many rows the run has collected to train on; None before that."""
    import pyarrow.compute as pc

    from scalingnote import pipeline
    from scalingnote.errors import ArtifactError

    try:
        splits = pipeline.locate(config, "triplets").table("triplets", ["split"])["split"]
    except (ArtifactError, OSError):  # not collected yet, or in a store that cannot be reached from here
        return None
    return int(pc.sum(pc.equal(splits, "train")).as_py() or 0)


def _compare(options: argparse.Namespace) -> int:
    configs = [_load(options, method) for method in options.methods]  # all checked before any is run
    from scalingnote import pipeline
    from scalingnote.evaluate.merge import merge
    from scalingnote.evaluate.report import comparison_table
    from scalingnote.storage import filesystem as fs

    places = {config.run_dir for config in configs}
    if len(places) > 1:
        raise ConfigError(
            f"methods name different run_dirs {sorted(places)}: give one with --set run_dir=..."
        )
    merged = merge([pipeline.run(config, record=False)["report"] for config in configs])
    table = comparison_table(merged)
    run_dir = configs[0].run_dir
    told = json.dumps(merged, indent=1, sort_keys=True)
    fs.write_bytes(fs.join(run_dir, "compare.json"), told.encode())
    fs.write_bytes(fs.join(run_dir, "compare.md"), f"{table}\n".encode())
    print(f"{table}\n\n{fs.join(run_dir, 'compare.md')}\n{fs.join(run_dir, 'compare.json')}")
    return 0


def _search(options: argparse.Namespace) -> int:
    if not options.query.strip() or options.k < 1:
        raise ConfigError("nothing to search: give some text and -k of at least 1")
    from scalingnote import pipeline

    config = pipeline.load_run(options.run)
    index = pipeline.locate(config, "index")
    tower = pipeline.locate(config, "student" if config.distill else "dual_encoder")
    from scalingnote.encode import exported
    from scalingnote.encode.query_encoder import QueryEncoder
    from scalingnote.search.searcher import Searcher

    clock = [time.perf_counter()]
    tower = exported.find(tower, options.form, options.run)
    encoder = QueryEncoder.load(tower.directory("query"), options.form)
    searcher = Searcher.open(index.uri)
    clock.append(time.perf_counter())
    queries = encoder.encode_queries([options.query])
    clock.append(time.perf_counter())
    results = searcher.search(queries, k=options.k)[0]
    clock.append(time.perf_counter())
    for rank, result in enumerate(results, 1):
        document = searcher.document(result)
        title = document["title"] or result.doc_id
        print(f"{rank:>3}. {result.score:.4f}  {title}")
        print(f"     {result.doc_id} · {document['topic']} · {document['semantic_id']}")
        print(f"     {' '.join(document['snippet'].split())[:200]}\n")
    load, encode, search = (1000 * (after - before) for before, after in itertools.pairwise(clock))
    times = f"load {load:.0f} ms, encode ({encoder.form}) {encode:.1f} ms, search {search:.1f} ms"
    print(f"{len(results)} results; {times}")
    return 0


def _ids(options: argparse.Namespace) -> int:
    from scalingnote import pipeline
    from scalingnote.quantize.reader import SemanticIds, parse

    ids = SemanticIds(pipeline.locate(pipeline.load_run(options.run), "semantic_ids"))
    prefix = parse(options.prefix)
    print(f"{ids.count(prefix):,} documents under {options.prefix or 'any code'}")
    for row in ids.documents(prefix, limit=options.k).to_pylist():
        print(f"  {row['semantic_id']}  {row['doc_id']}")
    if len(prefix) < ids.levels:
        children = sorted(ids.children(prefix).items(), key=lambda child: -child[1])
        print(f"{len(children):,} next codes")
        for code, documents in children[: options.k]:
            print(f"  {'-'.join(map(str, (*prefix, code)))}  {documents:,} documents")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from scalingnote.log import configure

    configure()
    return _serve_run(options.run, options.overrides)


def _serve_run(run_dir: str, overrides: Sequence[str]) -> int:
    # By name: the apps stand beside the command line, not below it.
    return int(importlib.import_module("serve.settings").start(run_dir, overrides))


def _export(options: argparse.Namespace) -> int:
    from scalingnote import pipeline
    from scalingnote.encode import exported
    from scalingnote.encode.config import ExportConfig
    from scalingnote.log import configure

    configure()
    config = pipeline.load_run(options.run)
    tower = pipeline.locate(config, "student" if config.distill else "dual_encoder")
    made = exported.build(
        ExportConfig(form=options.form),
        tower=tower,
        dataset=pipeline.locate(config, "dataset"),
        run_dir=options.run,
    )
    cosine = made.manifest.info["least_cosine"]
    print(f"{made.uri}\nleast cosine to the tower over {made.counts['golden']} queries: {cosine:.5f}")
    return 0


def _ingest(options: argparse.Namespace) -> int:
    from scalingnote import pipeline
    from scalingnote.config import load
    from scalingnote.ingest.config import IngestConfig
    from scalingnote.log import configure

    configure()
    if wrong := [column for column in options.column if "=" not in column]:
        raise ConfigError(f"--column {wrong[0]!r} is not of the form ours=theirs")
    columns = dict(column.split("=", 1) for column in options.column)
    config = load(IngestConfig, [], options.overrides)
    made = pipeline.ingest(config, options.file, run_dir=options.run, columns=columns)
    print(f"{made.uri}\n{made.counts['documents']:,} documents, {made.counts['rejected']:,} set aside")
    return 0


def _experiment(options: argparse.Namespace) -> int:
    from scalingnote import pipeline
    from scalingnote.config import load
    from scalingnote.experiment import report
    from scalingnote.experiment.config import ExperimentConfig
    from scalingnote.log import configure

    configure()
    made = pipeline.experiment(load(ExperimentConfig, options.config, options.overrides))
    told = made.read_json("report.json")
    print(f"{report.summary(told)}\n\n{report.table(told)}\n\n{report.READING}\n\n{made.uri}/report.html")
    return 0


def _ladder(options: argparse.Namespace) -> int:
    config = _load(options)
    from scalingnote import pipeline
    from scalingnote.storage import filesystem as fs

    made = pipeline.ladder(config)
    print(f"{fs.read_bytes(made.file('report.md')).decode()}\n{made.uri}/report.md")
    return 0


def _publish(options: argparse.Namespace) -> int:
    from scalingnote import pipeline
    from scalingnote.models.publish import publish

    config = pipeline.load_run(options.run)
    built = {stage.builds for stage in pipeline.stages(config)}
    for kind in (kind for kind in ("dual_encoder", "student") if kind in built):
        for folder in publish(pipeline.locate(config, kind), Path(options.folder) / kind):
            print(folder)
    return 0


def _submit(options: argparse.Namespace) -> int:
    config = _load(options)
    return int(
        importlib.import_module("jobs.submit").submit(
            options.stage,
            options.config,
            run_dir=config.run_dir,
            address=options.address,
            overrides=options.overrides,
            submission_id=options.submission_id,
            wait=options.wait,
        )
    )


def _datasets(options: argparse.Namespace) -> int:
    from scalingnote.datasets import registry
    from scalingnote.log import configure

    configure()
    if options.action == "list":
        width = max(map(len, registry.names()))
        for name in registry.names():
            state = "here" if registry.available(name) else "fetch"
            print(f"{name:<{width}}  {state:<5}  {registry.describe(name).summary}")
        return 0
    if options.dataset is None:
        raise ConfigError(f"name a dataset: scalingnote datasets {options.action} NAME; see `datasets list`")
    if options.action == "fetch":
        print(registry.fetch(options.dataset))
        return 0
    for key, value in dataclasses.asdict(registry.describe(options.dataset)).items():
        print(f"{key:<10}  {value}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from scalingnote import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if options.json else doctor.as_text(findings))
    return 1 if any(finding.level == "stops" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
