"""The change of a served run to the pair of a migration, and back: one entry of the catalog.

    migration.yaml, compared ─► catalog: query tower and index ─► run.yaml

Every gateway of a running service reads the catalog twice a second. It opens towers and shards of the new
pair while it answers from the old one, and then changes. A gateway that cannot open them continues with the
old pair and logs the reason. Then run.yaml is written, for `search`, `ingest` and the next start. After a
kill in between, the same call completes the change.

With `serve.live` both pairs receive every write, from before the change until `finish`. So either can answer.
"""

from dataclasses import dataclass

from scalingnote.core.errors import ConfigError
from scalingnote.index.live import versions as live_versions
from scalingnote.index.live.writes import kept_writes
from scalingnote.run import migration as migrations
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.migration import Migration
from scalingnote.run.service_config import ServeConfig, merge_sections
from scalingnote.serve import artifacts
from scalingnote.serve.artifacts import ServedArtifacts
from scalingnote.serve.catalog import Version
from scalingnote.serve.live_catalog import LiveCatalog


@dataclass(frozen=True)
class ChangedVersions:
    """The version that answers from now on, the previous one, and the folder or URI of the catalog."""

    active: Version
    before: Version
    state: str


def cut_over(run_dir: str, serve: ServeConfig) -> ChangedVersions:
    """Make the new pair the active version of a run's service, and the pair of the run.

    Args:
        run_dir: of a run with a migration that was compared.
        serve: settings of the service that override those of the run, as `scalingnote serve` takes them.

    Raises:
        ConfigError: the pairs were not compared, another run was recorded since, or the service cannot change
            to the new pair.
        ArtifactError: an artifact of either pair is missing.
    """
    migration = migrations.read(run_dir)
    if migration.comparison is None:
        raise ConfigError(
            f"the models in {run_dir} are not compared yet: `scalingnote migrate --run {run_dir} --to MODEL`"
        )
    _require_current(migration, migration.before, migration.after)
    escalation = merge_sections(run_dir, migration.after.serve, serve).escalation
    if escalation is not None and escalation.teacher is not None:
        raise ConfigError(
            f"serve.escalation.teacher is {escalation.teacher}, of the previous model: leave it out, and the "
            "teacher of the new run is used"
        )
    return _change(migration, migration.after, serve)


def roll_back(run_dir: str, serve: ServeConfig) -> ChangedVersions:
    """Make the pair before a migration active again, and the pair of the run.

    Errors are those of :func:`cut_over`.
    """
    migration = migrations.read(run_dir)
    _require_current(migration, migration.after, migration.before)
    return _change(migration, migration.before, serve)


def require_kept_writes(migration: Migration) -> None:
    """Raise ConfigError if a live run has written documents that the new model cannot encode again."""
    catalog = artifacts.of_run(migration.before, ServeConfig()).catalog
    if isinstance(catalog, LiveCatalog):
        log = live_versions.log_folder(catalog.pair_folder(catalog.pairs()[0]), 0)
        for _ in kept_writes(log):
            pass


def add_writes(migration: Migration) -> None:
    """Add the new pair to a live run: its service then writes earlier and new documents to this pair, too.

    ConfigError if the searchers of the service cannot hold the new index.
    """
    old, new = (artifacts.of_run(each, ServeConfig()) for each in (migration.before, migration.after))
    _require_same_shards(old, new)
    assert isinstance(old.catalog, LiveCatalog)
    assert isinstance(new.catalog, LiveCatalog)
    old.catalog.add(new.catalog.first)


def finish(run_dir: str, serve: ServeConfig) -> tuple[str, ...]:
    """Stop writes to all pairs but the active one; return their folders, which are kept.

    ConfigError if there is only one pair.
    """
    catalog = artifacts.of_run(pipeline.load_run(run_dir), serve).catalog
    ended_folders = catalog.end_others() if isinstance(catalog, LiveCatalog) else ()
    if not ended_folders:
        raise ConfigError(f"only one model receives writes in {run_dir}: there is nothing to finish")
    return ended_folders


def _require_current(migration: Migration, *either: RunConfig) -> None:
    """Raise ConfigError if the current run of the directory is not one of the migration's."""
    if pipeline.load_run(migration.run_dir) not in either:
        raise ConfigError(
            f"{migration.run_dir}/{pipeline.RUN_FILE} is of another run than those that were compared: "
            f"`scalingnote migrate --run {migration.run_dir} --to MODEL` again"
        )


def _change(migration: Migration, to: RunConfig, serve: ServeConfig) -> ChangedVersions:
    """Write the change to the catalog that the service reads, then to run.yaml."""
    old, new = (artifacts.of_run(config, serve) for config in (pipeline.load_run(migration.run_dir), to))
    catalog = old.catalog
    assert catalog.state is not None  # by default it is the folder `serve` of the run
    active = catalog.read()[0]
    version = catalog.version_of(new.index.uri)
    _require_same_shards(old, new)
    if active.name != version.name:
        catalog.activate(version)
    pipeline.make_current(to)
    return ChangedVersions(version, active, catalog.state)


def _require_same_shards(old: ServedArtifacts, new: ServedArtifacts) -> None:
    """Raise ConfigError if replicas hold a fixed number of shards and the new index has another number."""
    if len(old.shards) != len(new.shards) and not (old.gateway_searches and new.gateway_searches):
        raise ConfigError(
            f"the index has {len(new.shards)} shards, the searchers of this service hold {len(old.shards)}: "
            f"migrate with --set index.shards={len(old.shards)}"
        )
