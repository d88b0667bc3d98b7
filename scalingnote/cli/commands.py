"""The commands of `scalingnote`: each takes parsed options, does its work and returns the exit code.

Imports are inside the functions, so that `scalingnote --help` loads neither torch nor Ray.
"""

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalingnote.cli.terminal import show, show_hits, stdout
from scalingnote.core.errors import ConfigError
from scalingnote.core.words import checked_text

if TYPE_CHECKING:
    from scalingnote.run.config import RunConfig
    from scalingnote.storage.artifact import Artifact

HARDWARE = ("gpu", "mfu", "rows", "query_tokens", "document_tokens")  # options of a dry run


def _load(options: argparse.Namespace, *more: str) -> "RunConfig":
    from scalingnote.core.config import load
    from scalingnote.run.config import RunConfig

    config = load(RunConfig, [*options.config, *more], options.overrides)
    _check_place(config.run_dir)
    return config


def _check_place(run_dir: str) -> None:
    from scalingnote.core.ray_internals import in_submitted_job

    if "://" not in run_dir and not os.path.isabs(run_dir) and in_submitted_job():
        raise ConfigError(
            f"run_dir is {run_dir!r}, and the working directory of a job is deleted at its end: "
            "--set run_dir=... to a full path or a URI that every node reaches"
        )


def _print_json(artifact: "Artifact", options: argparse.Namespace) -> None:
    """Print a line of JSON about an artifact, for the process that started the command as a job."""
    if options.json:
        line = {"kind": artifact.manifest.kind, "uri": artifact.uri, "digest": artifact.digest}
        print(json.dumps(line | {"counts": artifact.counts}), flush=True)


def run(options: argparse.Namespace) -> int:
    """Run the chosen stages, and print the artifact of each."""
    hardware = {name: getattr(options, name) for name in HARDWARE if getattr(options, name) is not None}
    if options.dry_run:
        return _dry_run(options, hardware)
    if hardware or options.gpus is not None:
        raise ConfigError("hardware and sizes are options of a dry run: add --dry-run")
    config = _load(options)
    from scalingnote.run import pipeline, stages

    selected = stages.select(config, only=options.only, start=options.start, until=options.until)
    artifacts = pipeline.run(config, selected)
    if "report" in artifacts:
        from scalingnote.evaluate.merge import comparison, merge_artifacts

        show(stdout(), *comparison(merge_artifacts([[artifacts["report"]]])))
    width = max(len(kind) for kind in artifacts)
    for kind, artifact in artifacts.items():
        print(f"{kind:<{width}}  {artifact.uri}")
    if "report" in artifacts:
        print(f"\nreport: {config.run_dir}/report.html\ntry it: scalingnote serve --run {config.run_dir}")
    _print_json(list(artifacts.values())[-1], options)
    return _serve({"run_dir": config.run_dir}, options.overrides) if options.serve else 0


def _dry_run(options: argparse.Namespace, hardware: dict[str, str]) -> int:
    """Estimate memory, arithmetic and time of stage I."""
    if options.gpus is not None:
        options.overrides = [*options.overrides, f"train.resources.workers={options.gpus}"]
    config = _load(options)
    from scalingnote.core.config import validate
    from scalingnote.plan.config import Assumptions
    from scalingnote.plan.training_cost import dry_run_text, estimate

    # Rounds of stage I after the first learn from mined negatives.
    negatives = (config.mine if config.rounds > 1 else config.collect).num_negatives
    assumed = validate(Assumptions, hardware, source="--dry-run")
    if assumed.rows is None:
        assumed = assumed.model_copy(update={"rows": _training_rows(config)})
    print(dry_run_text(estimate(config.train, assumed, negatives=negatives)))
    return 0


def _training_rows(config: "RunConfig") -> int | None:
    """Return the number of training rows that the run has collected; None if there are none yet."""
    import pyarrow.compute as pc

    from scalingnote.core.errors import ArtifactError
    from scalingnote.run import pipeline

    try:
        splits = pipeline.locate(config, "triplets").table("triplets", ["split"])["split"]
    except (ArtifactError, OSError):  # not collected yet, or in a store that cannot be reached from here
        return None
    return int(pc.sum(pc.equal(splits, "train")).as_py() or 0)


def distill(options: argparse.Namespace) -> int:
    """Distil the query tower of a published model without queries, and publish it."""
    from scalingnote import api
    from scalingnote.core.reports import ReportTable
    from scalingnote.encode import lengths
    from scalingnote.train.distillation import agreement

    if options.endpoint and (options.folder or not options.model):
        raise ConfigError("an endpoint takes no MODEL: give the name of its model by --model NAME")
    if options.model and not options.endpoint:
        raise ConfigError(
            f"--model {options.model} is the name of a model at an endpoint: give --endpoint URL too"
        )
    if (options.refer or (options.index and options.vectors)) and not options.folder:
        raise ConfigError(
            "--refer needs a MODEL with files, and --index one that encodes documents: leave them out"
        )
    if options.max_requests is not None:
        options.overrides = [f"endpoint.max_requests={options.max_requests}", *options.overrides]
    config = api.run_config(
        options.model or options.folder,
        options.texts,
        endpoint=options.endpoint,
        vectors=options.vectors,
        to=options.to,
        student=options.student,
        queries=options.queries,
        count=options.count,
        seed=options.seed,
        run_dir=options.run,
        columns=_text_columns(options),
        overrides=options.overrides,
    )
    artifacts = api.build(config, options.overrides, index=options.index)
    comparison = api.publish(artifacts, Path(options.to), model=options.folder if options.refer else None)
    console = stdout()
    show(console, ReportTable(["", options.student, "teacher"], agreement.comparison_rows(comparison)))
    quality = (
        f"on {comparison.queries:,} held-out texts"
        if comparison.queries
        else "agreement not measured: no text is held out"
    )
    quality += f"; {agreement.expected_kept(comparison, options.student)}"
    source = artifacts.get("dataset", artifacts["query_embeddings"])
    rejected: dict[str, int] = source.manifest.info["rejected_by_reason"]
    reasons = ", ".join(f"{name.removeprefix('documents: ')} ({n:,})" for name, n in rejected.items())
    count = sum(rejected.values())
    set_aside = f"{count:,} {'row' if count == 1 else 'rows'} set aside" + (f": {reasons}" if reasons else "")
    show(
        console,
        f"{quality}; {set_aside}",
        *filter(None, [lengths.summary(artifacts)]),
        f"{options.to}\n\nfrom scalingnote import QueryEncoder",
        f'QueryEncoder({options.to!r}).encode(["..."])',
        f"encodes queries into the space of {options.model or options.folder or options.vectors}'s "
        + ("document embeddings" if options.vectors is None else "vectors"),
    )
    if options.index:
        print(f"\nscalingnote search QUERY --run {config.run_dir}\nscalingnote serve --run {config.run_dir}")
    return 0


def _text_columns(options: argparse.Namespace) -> dict[str, str]:
    from scalingnote.api import text_columns

    return text_columns(options.text_column, options.id_column, options.title_column)


def compare(options: argparse.Namespace) -> int:
    """Run every method with every seed, except finished stages, and print one table of all results."""
    if options.seeds < 1:
        raise ConfigError(f"--seeds is {options.seeds}: give 1 or more")
    configs = [_load(options, method) for method in options.methods]  # all are checked before the first run
    from scalingnote.core.reports import markdown_text
    from scalingnote.evaluate.merge import comparison, merge_artifacts
    from scalingnote.run import pipeline
    from scalingnote.storage import filesystem as fs

    places = {config.run_dir for config in configs}
    if len(places) > 1:
        raise ConfigError(
            f"methods have different run_dirs {sorted(places)}: give one with --set run_dir=..."
        )
    reports = merge_artifacts(
        [
            [
                pipeline.run(config.with_seed(number), record=False)["report"]
                for number in range(options.seeds)
            ]
            for config in configs
        ]
    )
    parts = comparison(reports)
    run_dir = configs[0].run_dir
    text = json.dumps(reports, indent=1, sort_keys=True)
    fs.write_bytes(fs.join(run_dir, "compare.json"), text.encode())
    fs.write_bytes(fs.join(run_dir, "compare.md"), f"{markdown_text(parts)}\n".encode())
    show(stdout(), *parts, fs.join(run_dir, "compare.md"), fs.join(run_dir, "compare.json"))
    return 0


def search(options: argparse.Namespace) -> int:
    """Print the best documents for a query, and the times to load, encode and search."""
    query = checked_text(options.query)  # a shell may pass bytes that are not UTF-8
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
    console = stdout()
    show_hits(console, hits, query)
    load, encode, search = (1000 * (after - before) for before, after in itertools.pairwise(clock))
    by = "embeddings" if encoded.terms is None else "embeddings and terms"
    form = index.query_path.encoder.form
    times = f"by {by}; load {load:.0f} ms, encode ({form}) {encode:.1f} ms, search {search:.1f} ms"
    show(console, f"{len(hits)} results; {times}")
    return 0


def ids(options: argparse.Namespace) -> int:
    """Print the documents with a prefix of codes, and the codes that follow the prefix."""
    from scalingnote.quantize.semantic_id import SemanticIds, parse_prefix
    from scalingnote.run import pipeline

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


def migrate(options: argparse.Namespace) -> int:
    """Build the index of another model and compare it with the served one, cut over to it, or roll back."""
    _check_place(options.run)
    if options.to is None:
        return _change_version(options)
    from scalingnote.run import migration

    console, pair = stdout(), migration.begin(options.run, options.to, options.overrides)
    takes_writes = pair.before.serve.live is not None
    if takes_writes:
        from scalingnote.serve import cut_over

        cut_over.require_kept_writes(pair)
    show(console, migration.plan(pair))
    if options.dry_run:
        return 0
    migration.build(pair)
    comparison = migration.compare(pair)
    if takes_writes:
        cut_over.add_writes(pair)
    from scalingnote.evaluate import pair_comparison

    report = comparison.read_json("report.json")
    show(
        console,
        pair_comparison.summary(report),
        pair_comparison.comparison_table(report),
        f"{comparison.uri}/report.html\nto serve it: scalingnote migrate --run {options.run} --cut-over",
    )
    if takes_writes:
        print("the running service writes to both from now on; its writer first encodes earlier writes")
    return 0


def _change_version(options: argparse.Namespace) -> int:
    """Serve the version of the other model, or the previous one; or end the writes to the other one."""
    if options.dry_run:
        raise ConfigError("--dry-run is for --to: leave it out")
    from scalingnote.core.config import load
    from scalingnote.run.service_config import AppArgs
    from scalingnote.serve import cut_over

    serve = load(AppArgs, (), [f"run_dir={options.run!r}", *options.overrides]).serve
    if options.finish:
        closed_pairs = cut_over.finish(options.run, serve)
        print(f"closed for writes, and no longer needed: {', '.join(closed_pairs)}")
        return 0
    change = cut_over.cut_over if options.cut_over else cut_over.roll_back
    versions = change(options.run, serve)
    active, before = versions.active, versions.before
    since = "active already" if before.name == active.name else f"before: {before.name}, {before.uri}"
    print(
        f"active: {active.name}, {active.uri}\n{since}\n"
        f"gateways that read {versions.state} open the new pair, then serve it: see GET /admin/index"
    )
    return 0


def serve(options: argparse.Namespace) -> int:
    """Serve a finished run, or only a model, until CTRL-C."""
    target = {"run_dir": options.run} if options.model is None else {"model": options.model}
    return _serve(target, options.overrides)


def _serve(served: dict[str, str], overrides: Sequence[str]) -> int:
    from scalingnote.core.config import load
    from scalingnote.run import pipeline
    from scalingnote.run.service_config import PROXY_TIMEOUTS, AppArgs, environment, merge_sections

    args = load(AppArgs, (), [*(f"{name}={path!r}" for name, path in served.items()), *overrides])
    config = args.serve
    if args.run_dir is not None:
        run = pipeline.load_run(args.run_dir)
        config = merge_sections(run.run_dir, run.serve, config)
    os.environ |= PROXY_TIMEOUTS | os.environ | environment(config)
    from scalingnote.serve import app, artifacts, launch  # they import Ray Serve, which reads the environment

    sources = artifacts.find(args)
    return launch.run(sources, app.bind(sources))


def export(options: argparse.Namespace) -> int:
    """Write a query tower as a graph and check it on real queries, or write vectors or all towers."""
    if options.model and (options.what != "onnx" or options.form == "onnx_int8"):
        raise ConfigError("--model exports a table as `export onnx --form onnx`: leave out the other choice")
    if options.what != "onnx":
        return _export_vectors(options) if options.what == "vectors" else _export_towers(options)
    from scalingnote.encode import exports
    from scalingnote.encode.config import ExportConfig
    from scalingnote.run import pipeline

    if options.model:
        if not options.to:
            raise ConfigError("the graph needs a folder: give --to DIR")
        cosine = exports.export_lookup(Path(options.model), Path(options.to))
        print(f"{options.to}\nleast cosine to the table over {exports.GOLDEN_QUERIES} queries: {cosine:.5f}")
        return 0
    config = pipeline.load_run(options.run)
    tower = pipeline.locate(config, config.query_tower_kind)
    graph = exports.build(
        ExportConfig(form=options.form or ("onnx" if exports.is_table(tower) else "onnx_int8")),
        tower=tower,
        dataset=pipeline.locate(config, "dataset"),
        run_dir=options.run,
    )
    cosine = graph.manifest.info["least_cosine"]
    print(f"{graph.uri}\nleast cosine to the tower over {graph.counts['golden']} queries: {cosine:.5f}")
    return 0


def _export_vectors(options: argparse.Namespace) -> int:
    if not options.to or not options.url:
        raise ConfigError("give the database (--to NAME) and its place (--url URL, FOLDER or FILE)")
    from scalingnote.export import databases, vectors
    from scalingnote.storage import filesystem as fs

    if options.to not in databases.DATABASES:
        raise ConfigError(
            f"--to {options.to} is not a database; choose from {', '.join(databases.DATABASES)}"
        )
    if options.embeddings:
        source = vectors.of_embeddings(options.embeddings, columns=options.columns)
    else:
        from scalingnote.run import pipeline

        config = pipeline.load_run(options.run)
        source = vectors.ExportSource(
            pipeline.locate(config, "embeddings"),
            pipeline.locate(config, "dataset"),
            pipeline.locate(config, "bm25_terms") if config.bm25 else None,
            tuple(_default_columns(config) if options.columns is None else options.columns),
        )
    name = vectors.checkpoint_name(source, to=options.to, url=options.url, collection=options.collection)
    folder = "exports" if options.embeddings else fs.join(options.run, "exports")
    summary = vectors.export(
        source,
        databases.connect(options.to, options.url, options.collection),
        checkpoint=options.checkpoint or fs.join(folder, name),
        most=options.rows,
        batch_rows=options.batch,
    )
    print("\n".join(summary.lines()))
    return 0


def _default_columns(config: "RunConfig") -> list[str]:
    """Return the columns for a database: title, filters of the index, and the place of a passage."""
    from scalingnote.storage.schema import PASSAGE

    divided = config.dataset.passages is not None
    return ["title", *config.index.filters, *(PASSAGE.names if divided else ())]


def _export_towers(options: argparse.Namespace) -> int:
    if not options.to:
        raise ConfigError("the towers need a folder: give --to DIR")
    from scalingnote.models.publish import publish
    from scalingnote.run import pipeline, stages

    config = pipeline.load_run(options.run)
    kinds = {stage.builds for stage in stages.of(config)}
    for kind in (kind for kind in ("dual_encoder", "student") if kind in kinds):
        for folder in publish(pipeline.locate(config, kind), Path(options.to) / kind):
            print(folder)
    return 0


def ingest(options: argparse.Namespace) -> int:
    """Encode, code and fuse new documents."""
    from scalingnote.core.config import load
    from scalingnote.encode.config import IngestConfig
    from scalingnote.run import pipeline

    if invalid := [column for column in options.column if "=" not in column]:
        raise ConfigError(f"--column {invalid[0]!r} is invalid: give OURS=THEIRS")
    columns = dict(column.split("=", 1) for column in options.column)
    if reserved := sorted({"doc_id", "title", "content"} & set(columns)):
        raise ConfigError(
            f"--column names {reserved}: give --id-column, --title-column and --text-column instead"
        )
    columns |= _text_columns(options)
    config = load(IngestConfig, [], options.overrides)
    batch = pipeline.ingest(config, options.file, run_dir=options.run, columns=columns)
    print(f"{batch.uri}\n{batch.counts['documents']:,} documents, {batch.counts['rejected']:,} set aside")
    _print_json(batch, options)
    return 0


def screen(options: argparse.Namespace) -> int:
    """Compare published models as teachers of tables, on a user's texts."""
    from scalingnote.core.config import load
    from scalingnote.datasets.sources import read_texts
    from scalingnote.train.distillation import screen as screening
    from scalingnote.train.distillation.config import ScreenConfig

    count = [] if options.count is None else [f"count={options.count}"]
    config = load(ScreenConfig, [], [*options.overrides, *count])
    rows = screening.screen(options.models, read_texts(options.texts, _text_columns(options)), config)
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=1) + "\n")
    best = f"best distilled into a table on these texts: {rows[0].model}"
    show(stdout(), screening.as_table(rows), best)
    return 0 if len(rows) == len(set(options.models)) else 1


def mteb(options: argparse.Namespace) -> int:
    """Evaluate a model with mteb on BEIR folders."""
    from scalingnote import api
    from scalingnote.core.reports import ReportTable
    from scalingnote.evaluate import mteb_model

    measures = ("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_100")
    is_folder = (Path(options.model) / "modules.json").exists()
    load = mteb_model.folder_model if is_folder else api.mteb_search
    model = load(options.model, name=options.name)
    tasks = [mteb_model.beir_task(folder) for folder in options.folders]
    results = mteb_model.evaluate(model, tasks, to=options.to)
    rows = [[name, *(f"{values[measure]:.4f}" for measure in measures)] for name, values in results.items()]
    show(stdout(), ReportTable(["task", *measures], rows), f"{options.to}/results")
    return 0


def experiment(options: argparse.Namespace) -> int:
    """Compare the arms of an experiment."""
    from scalingnote.core.config import load
    from scalingnote.evaluate.experiment import report
    from scalingnote.evaluate.experiment.config import ExperimentConfig
    from scalingnote.run import pipeline

    config = load(ExperimentConfig, options.config, options.overrides)
    _check_place(config.run_dir)
    artifact = pipeline.experiment(config)
    result = artifact.read_json("report.json")
    place = f"{artifact.uri}/report.html"
    show(stdout(), report.summary(result), report.comparison_table(result), report.ARMS_NOTE, place)
    _print_json(artifact, options)
    return 0


def ladder(options: argparse.Namespace) -> int:
    """Train stage I at several sizes, and print the scaling laws."""
    config = _load(options)
    from scalingnote.run import pipeline

    artifact = pipeline.ladder(config)
    print(f"{artifact.read_bytes('report.md').decode()}\n{artifact.uri}/report.md")
    _print_json(artifact, options)
    return 0


def submit(options: argparse.Namespace) -> int:
    """Submit a run, or some of its stages, to a cluster."""
    config = _load(options)
    from scalingnote.cli.submit import driver_options
    from scalingnote.cli.submit import submit as send
    from scalingnote.run import stages

    stages.select(
        config, only=options.only, start=options.start, until=options.until
    )  # raises an error here, before the upload
    return send(
        options.config,
        config=config,
        address=options.address,
        overrides=options.overrides,
        selection={"--only": options.only, "--from": options.start, "--until": options.until},
        submission_id=options.submission_id,
        detach=options.detach,
        retries=options.retries,
        driver=driver_options(options.driver_cpus, options.driver_memory, options.driver_resource),
    )


def plan(options: argparse.Namespace) -> int:
    """Print the GPU hours, machines and cost for a corpus."""
    from scalingnote.core.config import dump, validate
    from scalingnote.plan import capacity
    from scalingnote.plan.config import PlanConfig

    settings = {
        name: value for name in PlanConfig.model_fields if (value := getattr(options, name)) is not None
    }
    result = capacity.plan(validate(PlanConfig, settings, source="plan"))
    print(capacity.plan_text(result))
    if options.json:
        figures = result | {"config": dump(result["config"])}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(f"\n{options.json}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print the state of this machine; return 1 if a run cannot work."""
    from scalingnote.cli import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if options.json else doctor.as_text(findings))
    return 1 if any(finding.level == "stops" for finding in findings) else 0
