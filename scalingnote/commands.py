"""The commands of `scalingnote`: each takes parsed options, does its work and returns the exit code.

Imports stand inside the functions, so that `scalingnote --help` loads neither torch nor Ray.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalingnote.errors import ConfigError
from scalingnote.terminal import Style, listing, table
from scalingnote.texts import checked_text

if TYPE_CHECKING:
    from scalingnote.run_config import RunConfig


def _load(options: argparse.Namespace, *more: str) -> "RunConfig":
    from scalingnote.config import load
    from scalingnote.run_config import RunConfig

    return load(RunConfig, [*options.config, *more], options.overrides)


def run(options: argparse.Namespace) -> int:
    """Run the chosen stages; say what each built."""
    config = _load(options)
    from scalingnote import pipeline, stages

    chosen = stages.select(config, only=options.only, start=options.start, until=options.until)
    built = pipeline.run(config, chosen)
    if "report" in built:
        from scalingnote.evaluate.report import comparison_table, merge_artifacts

        print(table(comparison_table(merge_artifacts([[built["report"]]])), Style.of(sys.stdout)))
    width = max(len(kind) for kind in built)
    for kind, artifact in built.items():
        print(f"{kind:<{width}}  {artifact.uri}")
    if "report" in built:
        print(f"\nreport: {config.run_dir}/report.html\ntry it: scalingnote serve --run {config.run_dir}")
    return _serve({"run_dir": config.run_dir}, options.overrides) if options.serve else 0


def train(options: argparse.Namespace) -> int:
    """Stage I; with ``--dry-run`` only an estimate of its memory, arithmetic and time."""
    names = ("gpu", "mfu", "network", "rows", "query_tokens", "document_tokens")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if not options.dry_run:
        if given or options.gpus is not None:
            raise ConfigError("hardware and sizes are assumed in a dry run only: add --dry-run")
        return run(options)
    if options.gpus is not None:
        options.overrides = [*options.overrides, f"train.resources.workers={options.gpus}"]
    config = _load(options)
    from scalingnote.config import validate
    from scalingnote.scaling.config import Assumptions
    from scalingnote.scaling.output import dry_run_text
    from scalingnote.scaling.training_cost import estimate

    # A round of stage I after the first learns from mined negatives.
    given["negatives"] = (config.mine if config.rounds > 1 else config.collect).num_negatives
    assumed = validate(Assumptions, given, source="--dry-run")
    if assumed.rows is None:
        assumed = assumed.model_copy(update={"rows": _training_rows(config)})
    print(dry_run_text(estimate(config.train, assumed)))
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


def distill(options: argparse.Namespace) -> int:
    """Stage II of a config; or, with ``--texts``, the query side of a published model without queries."""
    if options.texts is None:
        if options.to is not None or _text_columns(options):
            raise ConfigError("--to and columns need --texts: the documents to distil from")
        return run(options)
    if options.to is None or len(options.config) != 1:
        raise ConfigError("distill takes one MODEL, --texts PATH and --to DIR")
    from scalingnote import api
    from scalingnote.distillation import agreement
    from scalingnote.reports import markdown

    (model,) = options.config
    config = api.run_config(
        model,
        options.texts,
        to=options.to,
        student=options.student,
        queries=options.queries,
        count=options.count,
        seed=options.seed,
        run_dir=options.run,
        columns=_text_columns(options),
        overrides=options.overrides,
    )
    built = api.build(config, options.overrides, index=options.index)
    found = api.publish(built, Path(options.to), model=model if options.refer else None)
    rows = [list(row) for row in agreement.comparison_rows(found)]
    style = Style.of(sys.stdout)
    print(f"\n{table(markdown(['', options.student, 'teacher'], rows, text=1), style)}\n")
    measured = (
        f"on {found.queries:,} held-out texts"
        if found.queries
        else "agreement not measured: no text is held out"
    )
    rejected: dict[str, int] = built["dataset"].manifest.info["rejected_by_reason"]
    reasons = ", ".join(f"{name.removeprefix('documents: ')} ({n:,})" for name, n in rejected.items())
    aside = f"{sum(rejected.values()):,} rows set aside" + (f": {reasons}" if reasons else "")
    print(f"{measured}; {aside}")
    print(
        f"{style.strong(options.to)}\n\nfrom scalingnote import QueryEncoder\n"
        f'QueryEncoder({options.to!r}).encode(["..."])  # the space of {model}\'s document embeddings'
    )
    if options.index:
        print(f"\nscalingnote search QUERY --run {config.run_dir}\nscalingnote serve --run {config.run_dir}")
    return 0


def _text_columns(options: argparse.Namespace) -> dict[str, str]:
    from scalingnote.api import text_columns

    return text_columns(options.text_column, options.id_column, options.title_column)


def compare(options: argparse.Namespace) -> int:
    """Run every method with every seed, except finished stages, and print one table of all."""
    if options.seeds < 1:
        raise ConfigError(f"--seeds is {options.seeds}: give 1 or more")
    configs = [_load(options, method) for method in options.methods]  # all checked before any is run
    from scalingnote import pipeline
    from scalingnote.evaluate.report import comparison_table, merge_artifacts
    from scalingnote.storage import filesystem as fs

    places = {config.run_dir for config in configs}
    if len(places) > 1:
        raise ConfigError(
            f"methods name different run_dirs {sorted(places)}: give one with --set run_dir=..."
        )
    merged = merge_artifacts(
        [
            [
                pipeline.run(config.with_seed(number), record=False)["report"]
                for number in range(options.seeds)
            ]
            for config in configs
        ]
    )
    comparison = comparison_table(merged)
    run_dir = configs[0].run_dir
    text = json.dumps(merged, indent=1, sort_keys=True)
    fs.write_bytes(fs.join(run_dir, "compare.json"), text.encode())
    fs.write_bytes(fs.join(run_dir, "compare.md"), f"{comparison}\n".encode())
    shown = table(comparison, Style.of(sys.stdout))
    print(f"{shown}\n\n{fs.join(run_dir, 'compare.md')}\n{fs.join(run_dir, 'compare.json')}")
    return 0


def search(options: argparse.Namespace) -> int:
    """Print the best documents for a query, with load, encode and search times."""
    query = checked_text(options.query)  # the shell may pass bytes that are not UTF-8
    if not query.strip() or options.k < 1:
        raise ConfigError("nothing to search: give some text and -k of at least 1")
    from scalingnote.api import Index

    clock = [time.perf_counter()]
    index = Index(options.run, form=options.form, escalate=options.escalate)
    clock.append(time.perf_counter())
    encoded = index.encode(query)
    clock.append(time.perf_counter())
    hits = index.search_encoded(encoded, k=options.k)
    clock.append(time.perf_counter())
    style = Style.of(sys.stdout)
    for line in listing(hits, query, style):
        print(line)
    load, encode, search = (1000 * (after - before) for before, after in itertools.pairwise(clock))
    by = "embeddings" if encoded.terms is None else "embeddings and terms"
    form = index.query_path.encoder.form
    times = f"by {by}; load {load:.0f} ms, encode ({form}) {encode:.1f} ms, search {search:.1f} ms"
    print(f"{len(hits)} results; {style.faint(times)}")
    return 0


def ids(options: argparse.Namespace) -> int:
    """Print the documents below a code, and the codes that follow it."""
    from scalingnote import pipeline
    from scalingnote.quantize.semantic_id import SemanticIds, parse_prefix

    ids = SemanticIds(pipeline.locate(pipeline.load_run(options.run), "semantic_ids"))
    prefix = parse_prefix(options.prefix)
    print(f"{ids.count(prefix):,} documents under {options.prefix or 'any code'}")
    for row in ids.documents(prefix, limit=options.k).to_pylist():
        print(f"  {row['semantic_id']}  {row['doc_id']}")
    if len(prefix) < ids.levels:
        children = sorted(ids.children(prefix).items(), key=lambda child: -child[1])
        print(f"{len(children):,} next codes")
        for code, documents in children[: options.k]:
            print(f"  {'-'.join(map(str, (*prefix, code)))}  {documents:,} documents")
    return 0


def serve(options: argparse.Namespace) -> int:
    """Serve a finished run, or a model alone, until CTRL-C."""
    served = {"run_dir": options.run} if options.model is None else {"model": options.model}
    return _serve(served, options.overrides)


def _serve(served: dict[str, str], overrides: Sequence[str]) -> int:
    from scalingnote import pipeline
    from scalingnote.config import load
    from scalingnote.serve_config import PROXY_TIMEOUTS, AppArgs, environment, merged

    args = load(AppArgs, (), [*(f"{name}={path!r}" for name, path in served.items()), *overrides])
    config = args.serve
    if args.run_dir is not None:
        run = pipeline.load_run(args.run_dir)
        config = merged(run.run_dir, run.serve, config)
    os.environ |= PROXY_TIMEOUTS | os.environ | environment(config)
    from scalingnote.serve import app, artifacts, launch  # they import Ray Serve, which reads the environment

    found = artifacts.find(args)
    return launch.run(found, app.bind(found))


def export(options: argparse.Namespace) -> int:
    """Write a query tower as a graph, checked on real queries; or vectors to a database."""
    if options.what == "vectors":
        return _export_vectors(options)
    from scalingnote import pipeline
    from scalingnote.encode import exports
    from scalingnote.encode.config import ExportConfig

    config = pipeline.load_run(options.run)
    tower = pipeline.locate(config, "student" if config.distill else "dual_encoder")
    made = exports.build(
        ExportConfig(form=options.form),
        tower=tower,
        dataset=pipeline.locate(config, "dataset"),
        run_dir=options.run,
    )
    cosine = made.manifest.info["least_cosine"]
    print(f"{made.uri}\nleast cosine to the tower over {made.counts['golden']} queries: {cosine:.5f}")
    return 0


def _export_vectors(options: argparse.Namespace) -> int:
    if not options.to or not options.url:
        raise ConfigError("name the database (--to) and where it is (--url URL, FOLDER or FILE)")
    from scalingnote.export import databases, vectors
    from scalingnote.storage import filesystem as fs

    if options.embeddings:
        source = vectors.of_embeddings(options.embeddings, columns=options.columns)
    else:
        from scalingnote import pipeline

        config = pipeline.load_run(options.run)
        source = vectors.Source(
            pipeline.locate(config, "embeddings"),
            pipeline.locate(config, "dataset"),
            pipeline.locate(config, "bm25_terms") if config.bm25 else None,
            tuple(("title", *config.index.filters) if options.columns is None else options.columns),
        )
    name = vectors.checkpoint_name(source, to=options.to, url=options.url, collection=options.collection)
    folder = "exports" if options.embeddings else fs.join(options.run, "exports")
    made = vectors.export(
        source,
        databases.connect(options.to, options.url, options.collection),
        checkpoint=options.checkpoint or fs.join(folder, name),
        most=options.rows,
        batch_rows=options.batch,
    )
    print("\n".join(made.lines()))
    return 0


def ingest(options: argparse.Namespace) -> int:
    """Encode, code and fuse new documents."""
    from scalingnote import pipeline
    from scalingnote.config import load
    from scalingnote.encode.config import IngestConfig

    if wrong := [column for column in options.column if "=" not in column]:
        raise ConfigError(f"--column {wrong[0]!r} is not of the form ours=theirs")
    columns = dict(column.split("=", 1) for column in options.column)
    if known := sorted({"doc_id", "title", "content"} & set(columns)):
        raise ConfigError(
            f"--column names {known}: give --id-column, --title-column and --text-column instead"
        )
    columns |= _text_columns(options)
    config = load(IngestConfig, [], options.overrides)
    made = pipeline.ingest(config, options.file, run_dir=options.run, columns=columns)
    print(f"{made.uri}\n{made.counts['documents']:,} documents, {made.counts['rejected']:,} set aside")
    return 0


def screen(options: argparse.Namespace) -> int:
    """Compare published models as teachers of tables on a user's texts."""
    from scalingnote.config import load
    from scalingnote.datasets.sources import read_texts
    from scalingnote.distillation import screen as screening
    from scalingnote.distillation.config import ScreenConfig

    count = [] if options.count is None else [f"count={options.count}"]
    config = load(ScreenConfig, [], [*options.overrides, *count])
    found = screening.screen(options.models, read_texts(options.texts, _text_columns(options)), config)
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n")
    shown = table(screening.as_table(found), Style.of(sys.stdout))
    print(f"{shown}\n\nbest distilled into a table on these texts: {found[0].model}")
    return 0 if len(found) == len(set(options.models)) else 1


def mteb(options: argparse.Namespace) -> int:
    """Evaluate a model by mteb on BEIR folders."""
    from scalingnote import api
    from scalingnote.evaluate import mteb_model
    from scalingnote.reports import markdown

    measures = ("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_100")
    is_tower = options.document is not None or (Path(options.model) / "modules.json").exists()
    model = (
        mteb_model.MtebModel.load(options.model, options.document, name=options.name)
        if is_tower
        else api.mteb_search(options.model, name=options.name)
    )
    tasks = [mteb_model.beir_task(folder) for folder in options.folders]
    found = mteb_model.evaluate(model, tasks, to=options.to)
    rows = [[name, *(f"{values[measure]:.4f}" for measure in measures)] for name, values in found.items()]
    shown = table(markdown(["task", *measures], rows), Style.of(sys.stdout))
    print(f"{shown}\n\n{options.to}/results")
    return 0


def experiment(options: argparse.Namespace) -> int:
    """Compare the arms of an experiment."""
    from scalingnote import pipeline
    from scalingnote.config import load
    from scalingnote.experiment import report
    from scalingnote.experiment.config import ExperimentConfig

    made = pipeline.experiment(load(ExperimentConfig, options.config, options.overrides))
    result = made.read_json("report.json")
    print(
        f"{report.summary(result)}\n\n{report.comparison_table(result)}\n\n{report.READING}\n\n{made.uri}/report.html"
    )
    return 0


def ladder(options: argparse.Namespace) -> int:
    """Train stage I at several sizes; print the laws."""
    config = _load(options)
    from scalingnote import pipeline

    made = pipeline.ladder(config)
    print(f"{made.read_bytes('report.md').decode()}\n{made.uri}/report.md")
    return 0


def publish(options: argparse.Namespace) -> int:
    """Copy a run's towers out."""
    from scalingnote import pipeline, stages
    from scalingnote.models.publish import publish

    config = pipeline.load_run(options.run)
    built = {stage.builds for stage in stages.of(config)}
    for kind in (kind for kind in ("dual_encoder", "student") if kind in built):
        for folder in publish(pipeline.locate(config, kind), Path(options.folder) / kind):
            print(folder)
    return 0


def submit(options: argparse.Namespace) -> int:
    """Send a run, or one stage, to a cluster."""
    config = _load(options)
    from scalingnote.submit import submit as send

    return send(
        options.stage,
        options.config,
        config=config,
        address=options.address,
        overrides=options.overrides,
        until=options.until,
        submission_id=options.submission_id,
        detach=options.detach,
        retries=options.retries,
        cpus=options.driver_cpus,
        memory_gb=options.driver_memory,
        resource=options.driver_resource,
    )


def plan(options: argparse.Namespace) -> int:
    """Print what a corpus costs in GPU hours, machines and money."""
    from scalingnote.scaling import output

    return output.print_plan(options)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of :func:`plan`."""
    from scalingnote.scaling import output

    output.add_plan_options(parser)


def datasets(options: argparse.Namespace) -> int:
    """List, describe or download datasets."""
    from scalingnote.datasets import sources

    if options.action == "list":
        width = max(map(len, sources.names()))
        for name in sources.names():
            state = "here" if sources.available(name) else "fetch"
            print(f"{name:<{width}}  {state:<5}  {sources.describe(name).summary}")
        return 0
    if options.dataset is None:
        raise ConfigError(f"name a dataset: scalingnote datasets {options.action} NAME; see `datasets list`")
    if options.action == "fetch":
        print(sources.fetch(options.dataset))
        return 0
    for key, value in dataclasses.asdict(sources.describe(options.dataset)).items():
        print(f"{key:<10}  {value}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print the state of this machine; exit code 1 if a run cannot work."""
    from scalingnote import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if options.json else doctor.as_text(findings))
    return 1 if any(finding.level == "stops" for finding in findings) else 0
