"""The versions of a live folder with one or more pairs of an index and its model.

    folder/pairs.json   the pairs, the active one first; without this file there is only the pair of the run
    folder              register and log of the first pair
    folder/pairs/MARK   register and log of another pair; MARK is the cut digest of its index, and a number

`scalingnote migrate` adds a pair when its index is built. From then on the writer adds each write to it, and
earlier writes as well. When it has all of them it is *filled*, and a service may change to it and back. One
process at a time replaces the file atomically, so writer, encoders, searchers and gateways read a valid
state.
"""

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter

from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.index.live import versions as live_versions
from scalingnote.index.live.wal import make_folder
from scalingnote.index.shard import open_layout
from scalingnote.serve.catalog import PairedTowers, Version, require_no_own_towers, towers_of
from scalingnote.serve.towers import Location
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import open_artifact

LIVE_PAIRS_FILE = "pairs.json"
MARK_CHARACTERS = 8  # of the digest of an index


@dataclass(frozen=True)
class DocumentPathParts:
    """The artifacts that turn a document into an index row, for replicas to load."""

    towers: Location
    semantic_ids: Location
    embeddings: Location
    dataset: Location
    snippet_chars: int
    bm25_terms: Location | None = None  # of an index with words


@dataclass(frozen=True)
class LivePair:
    """An index, the artifacts that encode for it, and the name of the folder with its writes."""

    index: str  # URI of the index that was built
    documents: DocumentPathParts | None = None  # None: it receives no writes
    towers: PairedTowers | None = None  # None: those that the manifest of its index records
    mark: str = ""  # name of its folder, and prefix of the names of its versions; empty for the first pair
    filled: bool = True  # whether its delta has every write


@dataclass(frozen=True)
class _PairsFile:
    """The content of LIVE_PAIRS_FILE."""

    added: int = 0  # number of pairs that were ever added
    pairs: tuple[LivePair, ...] = ()


_FILE = TypeAdapter(_PairsFile)


@dataclass(frozen=True)
class LiveCatalog:
    """The versions of a live index, from its registers. Their names are their numbers.

    With a delta there may be two pairs of an index and its towers, each with a register. The versions of
    filled pairs are listed, and any of them may become the active one.
    """

    folder: str
    first: LivePair  # the only one until another is added
    delta: bool = False  # whether writes are outside the versions, which are then like those of a Catalog
    own_towers: tuple[str, ...] = ()  # arms with a separate query tower that search the active index

    @property
    def state(self) -> str:
        """The folder that stores which version is active."""
        return self.folder

    # --- versions -------------------------------------------------------------------------------------

    def read(self) -> tuple[Version, ...]:
        """Return the versions that are kept, the current one of the active pair first."""
        return tuple(version for pair in self.pairs() if pair.filled for version in self._versions(pair))

    def _versions(self, pair: LivePair) -> tuple[Version, ...]:
        folder = self.pair_folder(pair)
        if not live_versions.register_exists(folder):
            live_versions.current(folder, pair.index, delta=self.delta)  # creates the register
        records = sorted(live_versions.listing(folder), key=lambda v: (not v.current, -v.number))
        dim, towers = _dim(pair.index), pair.towers or _towers(pair.index)
        prefix = f"{pair.mark}-" if pair.mark else ""
        return tuple(
            Version(f"{prefix}{v.number}", v.uri, v.documents, dim, v.created, towers) for v in records
        )

    def version_of(self, index: str) -> Version:
        """Return the current version of an index's pair; ConfigError without one, or if it lacks writes."""
        pair = {each.index: each for each in self.pairs()}.get(index)
        if pair is None:
            raise ConfigError(
                f"{self.folder} does not receive writes for {index}: `scalingnote migrate --to MODEL` adds "
                "a model if serve.live.keep_documents is set, and --finish ends the other one"
            )
        if not pair.filled:
            raise ConfigError(
                f"the delta of {index} does not have every write yet: the writer of the running service "
                "encodes them, and its log reports how many are left; try again when it has finished"
            )
        return self._versions(pair)[0]

    def place(self, version: str) -> tuple[str, int]:
        """Return the folder of a version's register, and its number there; ConfigError if it has no pair."""
        mark, _, number = version.rpartition("-")
        for pair in self.pairs():
            if pair.mark == mark:
                return self.pair_folder(pair), int(number)
        raise ConfigError(f"{self.folder} has no version {version} any more: another model replaced it")

    def activate(self, version: Version) -> tuple[Version, ...]:
        """Make a kept version the current one. Each of them has every write; errors as in :meth:`pair`."""
        folder, number = self.place(self.pair(version).name)
        # With a delta, each searcher has just read all files of its shards.
        live_versions.activate(folder, number, checked=self.delta)
        if self.delta:
            self._change(
                lambda pairs: tuple(sorted(pairs, key=lambda each: self.pair_folder(each) != folder))
            )
        return self.read()

    def pair(self, version: Version) -> Version:
        """Return the kept version of this name and URI, with its towers.

        SearchError if it is not kept, ConfigError if an arm would search the index of another model.
        """
        served = self.read()
        kept_version = {each.name: each for each in served}.get(version.name)
        if kept_version is None or kept_version.uri != version.uri:
            raise SearchError(
                f"{version.uri} is not a version of this live index, which changes only to versions that its "
                "compaction wrote, or that `scalingnote migrate` has added: to serve another index, start an "
                "application of it with a separate live folder"
            )
        if kept_version.towers != served[0].towers:
            require_no_own_towers(kept_version, self.own_towers)
        return kept_version

    def names_to_keep(self, version: Version) -> set[str]:
        """Return the names of the versions to hold while this one is opened."""
        return {version.name, *(each.name for each in self.read())}

    def previous(self) -> Version:
        """Return the first kept version that is not current; SearchError if there is none."""
        others = self.read()[1:]
        if not others:
            raise SearchError("no other version is kept: there is nothing to roll back to")
        return others[0]

    # --- pairs ----------------------------------------------------------------------------------------

    def pairs(self) -> tuple[LivePair, ...]:
        """Return the pairs, the active one first."""
        return self._file().pairs or (self.first,)

    def pairs_changed_at(self) -> int:
        """Return the time of the last change of the pairs, in nanoseconds; 0: no pair was ever added."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def pair_folder(self, pair: LivePair) -> str:
        """Return the folder of a pair's register and log."""
        return str(Path(self.folder) / "pairs" / pair.mark) if pair.mark else self.folder

    def add(self, pair: LivePair) -> None:
        """Add a pair to the active one, in place of any other; an existing pair is not changed.

        Its mark is chosen here.
        """
        digest = open_artifact(pair.index, kind="index").digest

        def add_second(pairs: tuple[LivePair, ...]) -> tuple[LivePair, ...]:
            if any(each.index == pair.index for each in pairs):
                return pairs
            # A pair that is added again gets another mark: its old log lacks the writes since its end.
            mark = f"{digest[:MARK_CHARACTERS]}.{self._file().added + 1}"
            new_pair = replace(pair, mark=mark, filled=False)
            shutil.rmtree(self.pair_folder(new_pair), ignore_errors=True)  # of a call that was killed
            # The register is created before any process can read the pair.
            live_versions.current(self.pair_folder(new_pair), pair.index, delta=True)
            return pairs[0], new_pair

        self._change(add_second)

    def set_filled(self, index: str) -> None:
        """Record that a pair has every write."""
        self._change(
            lambda pairs: tuple(replace(each, filled=each.filled or each.index == index) for each in pairs)
        )

    def end_others(self) -> tuple[str, ...]:
        """Remove all pairs but the active one, so that they receive no more writes.

        Return their folders, which are not deleted.
        """
        others = self.pairs()[1:]
        self._change(lambda pairs: pairs[:1])
        return tuple(map(self.pair_folder, others))

    @property
    def _path(self) -> Path:
        return Path(self.folder) / LIVE_PAIRS_FILE

    def _file(self) -> _PairsFile:
        try:
            return _FILE.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _PairsFile()

    def _change(self, change: Callable[[tuple[LivePair, ...]], tuple[LivePair, ...]]) -> None:
        make_folder(Path(self.folder))
        with Path(f"{self._path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by closing
            before = self.pairs()
            after = change(before)
            if after == before:
                return
            added = self._file().added + len({each.mark for each in after} - {each.mark for each in before})
            fs.replace_durably(self._path, _FILE.dump_json(_PairsFile(added, after), indent=1).decode())


@lru_cache(maxsize=64)  # versions are listed many times a second
def _towers(index: str) -> PairedTowers | None:
    return towers_of(open_artifact(index, kind="index"))


@lru_cache(maxsize=64)
def _dim(index: str) -> int:
    return open_layout(open_artifact(index, kind="index")).dim
