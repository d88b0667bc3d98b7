"""`scalingnote`: the command line, its options and its exit codes.

Only argparse is loaded before a command is chosen, so `--help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scalingnote.cli import commands
from scalingnote.core import __version__
from scalingnote.core.errors import ScalingNoteError, explained_imports
from scalingnote.run import stages

TEXTS_HELP = "documents: .jsonl, .parquet, .tsv, .txt or .md, a folder or glob of them"
Command = Callable[[str, Any, str], "_Parser"]  # name, function, help -> parser of the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 success, 1 a failed check, 2 wrong input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    from scalingnote.core.log import configure  # late, as `--help` logs nothing

    configure()
    try:
        with explained_imports():
            return int(options.command(options))
    except ScalingNoteError as error:
        if os.environ.get("SCALINGNOTE_DEBUG") == "1":
            raise
        # Ray wraps the error of a remote task with its traceback; `cause` is the original error.
        print(f"scalingnote: {getattr(error, 'cause', error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `scalingnote plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """Parser of a command; `declare` adds options only when the command is chosen."""

    declare: Callable[[argparse.ArgumentParser], None] | None = None

    def complete(self) -> "_Parser":
        """Add the options that are declared late, and return the parser."""
        if self.declare is not None:
            declare, self.declare = self.declare, None
            declare(self)
        return self

    def parse_known_args(self, *args: Any, **knobs: Any) -> Any:
        """Parse the command's options, after adding those that are declared late."""
        self.complete()
        return super().parse_known_args(*args, **knobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scalingnote",
        usage="scalingnote COMMAND [options]",
        description="Train, index and serve dual encoders.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(
        prog="scalingnote", metavar="COMMAND", required=True, parser_class=_Parser, help=argparse.SUPPRESS
    )
    lines: list[str] = []

    def command(name: str, function: Any, text: str) -> _Parser:
        subparser = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(command=function, name=name)
        lines.append(f"  {name:<11} {text}")
        return subparser

    groups: tuple[tuple[str, Callable[[Command], None]], ...] = (
        ("your model", _add_model_commands),
        ("runs and cluster", _add_run_commands),
        ("service", _add_service_commands),
        ("data and tools", _add_tools),
    )
    for title, declare in groups:
        lines.append(f"{title}:")
        declare(command)
        lines.append("")
    parser.epilog = "\n".join(lines[:-1])
    return parser


def _add_model_commands(command: Command) -> None:
    distill = command("distill", commands.distill, "make a query table of a published model, without queries")
    distill.add_argument("folder", metavar="MODEL", nargs="?", help="hub id or folder")
    distill.add_argument("--texts", metavar="PATH", help=TEXTS_HELP)
    teacher = distill.add_argument_group("another teacher than MODEL")
    teacher.add_argument(
        "--endpoint", metavar="URL", help="URL of OpenAI's /v1 or TEI's /embed; key: SCALINGNOTE_ENDPOINT_KEY"
    )
    teacher.add_argument("--model", metavar="NAME", help="name of the model at the endpoint")
    teacher.add_argument("--max-requests", type=int, metavar="N", help="maximum number of requests to send")
    teacher.add_argument(
        "--vectors", metavar="FILE", help=".parquet or .jsonl of texts and vectors, or .npy with --texts"
    )
    _add_columns(distill)
    distill.add_argument("--to", required=True, metavar="DIR", help="folder of the query tower")
    distill.add_argument("--student", default="table", help="table, static, or a smaller MODEL")
    distill.add_argument(
        "--queries",
        metavar="FILE",
        help="real queries to learn from as well; with --vectors, they need vectors",
    )
    distill.add_argument(
        "--count", type=int, metavar="N", help="number of texts to sample from the documents"
    )
    distill.add_argument("--seed", type=int, default=0, help="seed of all sampling, default: %(default)s")
    distill.add_argument(
        "--run", metavar="DIR", help="folder of unfinished work and artifacts, default: DIR.run"
    )
    distill.add_argument(
        "--index",
        action="store_true",
        help="also index the documents; search and serve them with --run DIR.run",
    )
    distill.add_argument(
        "--refer", action="store_true", help="refer to the model in DIR instead of copying it"
    )
    _add_set(distill)

    screen = command(
        "screen", commands.screen, "measure which published model distils well into a table on your texts"
    )
    screen.add_argument("models", nargs="+", metavar="MODEL", help="hub ids or folders")
    screen.add_argument("--texts", required=True, metavar="PATH", help=TEXTS_HELP)
    _add_columns(screen)
    screen.add_argument(
        "--count", type=int, metavar="N", help="number of pseudo-queries to sample, default: 5000"
    )
    screen.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    _add_set(screen)

    mteb = command("mteb", commands.mteb, "evaluate a model or a run's search by mteb on BEIR folders")
    mteb.add_argument("model", help="folder written by `distill`, or run_dir of a finished run")
    mteb.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="corpus.jsonl, queries.jsonl, qrels/test.tsv"
    )
    mteb.add_argument(
        "--to", default="mteb", metavar="DIR", help="folder of the results files, default: %(default)s"
    )
    mteb.add_argument("--name", default="", metavar="ORG/MODEL", help="name of the model in the results")


def _add_run_commands(command: Command) -> None:
    run = command("run", commands.run, "run the stages of a config, or some of them, skipping finished ones")
    _add_config(run)
    _add_selection(run)
    run.declare = _list_stages_and_datasets
    run.add_argument("--serve", action="store_true", help="then serve the run, until CTRL-C")
    _add_json(run)
    _add_dry_run(run)

    compare = command(
        "compare", commands.compare, "run several methods on one dataset and merge their reports"
    )
    _add_config(compare)
    compare.add_argument("--methods", nargs="+", required=True, metavar="FILE", help="one config per method")
    compare.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="number of runs of each method, with different seeds; default: %(default)s",
    )

    ladder = command("ladder", commands.ladder, "train stage I at several sizes and fit the scaling laws")
    _add_config(ladder)
    _add_json(ladder)

    submit = command("submit", commands.submit, "send a run to a Ray cluster as a job, and follow its log")
    _add_config(submit)
    _add_selection(submit)
    submit.add_argument("--address", required=True, metavar="URL", help="e.g. http://head-node:8265")
    submit.add_argument(
        "--submission-id", metavar="ID", help="id of the job; a job that has it already is followed"
    )
    submit.add_argument(
        "--detach", action="store_true", help="print the id of the job and exit, without following it"
    )
    submit.add_argument("--retries", type=int, default=0, metavar="N", help="attempts after a failure")
    driver = submit.add_argument_group(
        "driver", "the node of the driver; by default the head, without a reservation"
    )
    driver.add_argument("--driver-cpus", type=float, metavar="N", help="CPUs to reserve")
    driver.add_argument("--driver-memory", type=float, metavar="GB", help="memory to reserve")
    driver.add_argument(
        "--driver-resource",
        metavar="NAME",
        help="custom resource of the nodes that may run it, e.g. of on-demand nodes",
    )

    plan = command("plan", commands.plan, "estimate GPU hours, machines and cost for a corpus")
    plan.declare = _add_plan_options


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the fields of PlanConfig as options."""
    from scalingnote.plan.config import PlanConfig

    for name, field in PlanConfig.model_fields.items():
        several, is_text = isinstance(field.default, tuple), name in ("model", "gpu", "query_tower")
        text = field.description or ""
        if not field.is_required() and field.default is not None:
            text += f", default: {' '.join(map(str, field.default)) if several else field.default}"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=str if is_text else float,
            nargs="+" if several else None,
            required=field.is_required(),
            metavar="TEXT" if is_text else "N",
            help=text,
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def _add_service_commands(command: Command) -> None:
    search = command("search", commands.search, "search a finished run from the shell, without a server")
    search.add_argument("query", help="text to search for")
    _add_run(search)
    search.add_argument("--form", default="auto", help="form of the query tower: onnx_int8, torch, ...")
    search.add_argument("-k", type=int, default=5, help="number of results, default: %(default)s")
    search.add_argument(
        "--escalate",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of queries that the teacher encodes",
    )

    ids = command(
        "ids", commands.ids, "list the documents of a finished run by a prefix of their semantic ID"
    )
    ids.add_argument("prefix", nargs="?", default="", help="codes, e.g. 12-7; none: all documents")
    _add_run(ids)
    ids.add_argument(
        "-k", type=int, default=10, help="number of documents and of next codes, default: %(default)s"
    )

    migrate = command("migrate", commands.migrate, "build, compare and serve another model for a run")
    _add_run(migrate)
    step = migrate.add_mutually_exclusive_group(required=True)
    step.add_argument(
        "--to",
        metavar="MODEL",
        help="hub id, folder, package:NAME or config (.yaml): index the documents with it, and compare",
    )
    step.add_argument(
        "--cut-over", action="store_true", help="serve the other model: tower and index as one version"
    )
    step.add_argument("--roll-back", action="store_true", help="serve the previous model again")
    step.add_argument(
        "--finish",
        action="store_true",
        help="with serve.live: end the writes to the model that is not served",
    )
    migrate.add_argument("--dry-run", action="store_true", help="with --to: print the plan, start nothing")
    _add_set(migrate)

    serve = command("serve", commands.serve, "serve a finished run: HTTP and a search page on one URL")
    _add_run(serve)
    serve.add_argument(
        "--model", metavar="DIR", help="serve only embeddings, of a published model or an exported tower"
    )
    _add_set(serve)
    _add_export(command)
    _add_ingest(command)


def _add_export(command: Command) -> None:
    export = command(
        "export",
        commands.export,
        "write a run's query tower as ONNX, its vectors to a database, or its towers to folders",
    )
    export.add_argument(
        "what",
        nargs="?",
        choices=("onnx", "vectors", "towers"),
        default="onnx",
        help="onnx (the default): a graph of the query tower; towers: folders with model cards",
    )
    _add_run(export)
    export.add_argument(
        "--to",
        metavar="WHERE",
        help="towers, onnx of a --model: a folder; vectors: qdrant, milvus, opensearch, lancedb or parquet",
    )
    export.add_argument(
        "--form",
        choices=("onnx_int8", "onnx"),
        help="form of the graph, default: onnx_int8; a table has only onnx",
    )
    export.add_argument(
        "--model", metavar="DIR", help="onnx: a folder of `distill` with a table, instead of a run"
    )
    vectors = export.add_argument_group("vectors")
    vectors.add_argument(
        "--url", metavar="URL", help="URL of the server, or a folder or file of a local database"
    )
    vectors.add_argument("--collection", default="scalingnote", help="default: %(default)s")
    vectors.add_argument(
        "--embeddings", metavar="URI", help="an artifact of the stage encode, instead of a run"
    )
    vectors.add_argument(
        "--columns",
        nargs="*",
        metavar="NAME",
        help="columns of the documents; default: title and the filters of the index",
    )
    vectors.add_argument("--rows", type=int, metavar="N", help="number of rows to write; default: all")
    vectors.add_argument(
        "--batch", type=int, metavar="N", help="rows per request; default: depends on the database"
    )
    vectors.add_argument("--checkpoint", metavar="FILE", help="default: a file in DIR/exports")


def _add_ingest(command: Command) -> None:
    ingest = command(
        "ingest", commands.ingest, "encode, code and fuse new documents with the models of a run"
    )
    ingest.add_argument(
        "file", help="JSON lines or Parquet: id, text, title, topic, features; or a folder of Markdown"
    )
    _add_run(ingest)
    _add_columns(ingest)
    ingest.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="column of the file with a feature, topic or group",
    )
    _add_set(ingest)
    _add_json(ingest)


def _add_tools(command: Command) -> None:
    experiment = command(
        "experiment", commands.experiment, "compare the arms of an experiment, from access logs"
    )
    _add_config(experiment)
    _add_json(experiment)

    doctor = command("doctor", commands.doctor, "check this machine and print a remedy for each problem")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="+", metavar="CONFIG", help="YAML files; later files override earlier ones"
    )
    _add_set(parser)


def _list_stages_and_datasets(run: argparse.ArgumentParser) -> None:
    """List all stages and all kinds of data sets at the end of the help."""
    from scalingnote.datasets.sources import SUMMARIES

    run.epilog = "\n".join(
        [
            "stages:",
            *(f"  {stage.name:<14} {stage.summary}" for stage in stages.RUN_STAGES),
            "",
            "data sets, by dataset.name:",
            *(f"  {name:<14} {summary}" for name, summary in SUMMARIES.items()),
        ]
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--only",
        metavar="STAGE",
        help="run only this stage; train@1 is stage train of the first of several rounds",
    )
    which.add_argument("--from", metavar="STAGE", dest="start", help="run from this stage on")
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print a JSON line at the end: kind, uri, digest and counts"
    )


def _add_dry_run(run: argparse.ArgumentParser) -> None:
    dry = run.add_argument_group("dry run")
    dry.add_argument(
        "--dry-run",
        action="store_true",
        help="print memory per GPU, arithmetic and days of stage I; start nothing",
    )
    dry.add_argument("--gpu", metavar="KIND", help="H200, H100 (the default), A100, L40S or L4")
    dry.add_argument("--gpus", type=int, metavar="N", help="default: train.resources.workers")
    dry.add_argument("--mfu", metavar="SHARE", help="share of peak FLOP/s that is reached, default: 0.4")
    dry.add_argument("--rows", metavar="N", help="number of training rows, default: the collected ones")
    dry.add_argument("--query-tokens", metavar="N", help="mean length, default: the longest")
    dry.add_argument("--document-tokens", metavar="N", help="mean length, default: the longest")


def _add_columns(parser: argparse._ActionsContainer) -> None:
    for name, of in (("text", "texts"), ("id", "ids"), ("title", "titles")):
        parser.add_argument(
            f"--{name}-column", metavar="NAME", help=f"column of {of} in the files; default: by known names"
        )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", default="runs/quickstart", metavar="DIR", help="run_dir, default: %(default)s"
    )


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        dest="overrides",
        help="override one setting; repeatable",
    )


if __name__ == "__main__":
    sys.exit(main())
