"""The versions of a live folder, of one pair of an index and its model, or of more.

    folder/pairs.json   the pairs, the active one first; without the file there is the one of the run
    folder              register and log of the first pair
    folder/pairs/MARK   register and log of another one; MARK is its index's digest, cut, and its number

A pair is added by `scalingnote migrate` once its index is built. From then on the writer gives it each write,
and what was written before as well; then it is *filled*, and a service may change to it and back. The file
is replaced as a whole, by one process at a time, so writer, encoders, searchers and gateways read what is so.
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
    bm25_terms: Location | None = None  # of an index that holds words


@dataclass(frozen=True)
class LivePair:
    """An index, what encodes for it, and where its writes are."""

    index: str  # URI of the index that was built
    documents: DocumentPathParts | None = None  # None: nothing is written
    towers: PairedTowers | None = None  # None: those that the manifest of its index names
    mark: str = ""  # names its folder, and begins the names of its versions; none of the first pair
    filled: bool = True  # whether its delta has every write


@dataclass(frozen=True)
class _PairsFile:
    """The content of LIVE_PAIRS_FILE."""

    added: int = 0  # pairs, ever
    pairs: tuple[LivePair, ...] = ()


_FILE = TypeAdapter(_PairsFile)


@dataclass(frozen=True)
class LiveCatalog:
    """The versions of a live index, from its own registers. They are named by their numbers.

    With a delta there may be two pairs of an index and its towers, each with a register: those that are
    filled are listed, and any of their versions may become the active one.
    """

    folder: str
    first: LivePair  # the only one until another is added
    delta: bool = False  # whether writes lie beside the versions, which are then held as those of a Catalog
    own_towers: tuple[str, ...] = ()  # arms with a query tower of their own, which search the active index

    @property
    def state(self) -> str:
        """The folder that remembers the active version."""
        return self.folder

    # --- versions -------------------------------------------------------------------------------------

    def read(self) -> tuple[Version, ...]:
        """The versions that are kept, the current one of the active pair first."""
        return tuple(version for pair in self.pairs() if pair.filled for version in self._versions(pair))

    def _versions(self, pair: LivePair) -> tuple[Version, ...]:
        folder = self.pair_folder(pair)
        if not live_versions.register_exists(folder):
            live_versions.current(folder, pair.index, delta=self.delta)  # creates the registry
        listed = sorted(live_versions.listing(folder), key=lambda v: (not v.current, -v.number))
        dim, towers = _dim(pair.index), pair.towers or _towers(pair.index)
        prefix = f"{pair.mark}-" if pair.mark else ""
        return tuple(
            Version(f"{prefix}{v.number}", v.uri, v.documents, dim, v.created, towers) for v in listed
        )

    def version_of(self, index: str) -> Version:
        """The current version of an index's pair; ConfigError where it lacks writes, or there is none."""
        pair = {each.index: each for each in self.pairs()}.get(index)
        if pair is None:
            raise ConfigError(
                f"{self.folder} takes no writes for {index}: `scalingnote migrate --to MODEL` adds a model "
                "where serve.live.keep_documents is set, and --finish ends the other one"
            )
        if not pair.filled:
            raise ConfigError(
                f"the delta of {index} does not have every write yet: the writer of the running service "
                "encodes them, and its log says how many are left; try again when it has done so"
            )
        return self._versions(pair)[0]

    def place(self, version: str) -> tuple[str, int]:
        """The folder of a version's register, and its number there; ConfigError where its pair is gone."""
        mark, _, number = version.rpartition("-")
        for pair in self.pairs():
            if pair.mark == mark:
                return self.pair_folder(pair), int(number)
        raise ConfigError(f"{self.folder} has no version {version} any more: another model took its place")

    def activate(self, version: Version) -> tuple[Version, ...]:
        """Make a kept version the current one; each of them has every write. Errors as of :meth:`pair`."""
        folder, number = self.place(self.pair(version).name)
        # Of a large index the searchers have just read all files, each its own.
        live_versions.activate(folder, number, checked=self.delta)
        if self.delta:
            self._change(
                lambda pairs: tuple(sorted(pairs, key=lambda each: self.pair_folder(each) != folder))
            )
        return self.read()

    def pair(self, version: Version) -> Version:
        """The version as it is kept, with its towers.

        SearchError where it is not kept, ConfigError where an arm would search the index of another model.
        """
        served = self.read()
        kept = {each.name: each for each in served}.get(version.name)
        if kept is None or kept.uri != version.uri:
            raise SearchError(
                f"{version.uri} is no version of this live index, which changes only to versions that its "
                "compaction wrote, or whose writes `scalingnote migrate` has prepared: to serve another "
                "index, start an application of it with a live folder of its own"
            )
        if kept.towers != served[0].towers:
            require_no_own_towers(kept, self.own_towers)
        return kept

    def names_to_keep(self, version: Version) -> set[str]:
        """Names of the versions to hold while this one is opened."""
        return {version.name, *(each.name for each in self.read())}

    def previous(self) -> Version:
        """The newest version that is not current; SearchError when none is kept."""
        others = self.read()[1:]
        if not others:
            raise SearchError("no other version is kept: there is nothing to roll back to")
        return others[0]

    # --- pairs ----------------------------------------------------------------------------------------

    def pairs(self) -> tuple[LivePair, ...]:
        """The pairs, the active one first."""
        return self._file().pairs or (self.first,)

    def pairs_changed_at(self) -> int:
        """When the pairs changed last, in nanoseconds; 0: no pair was ever added."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def pair_folder(self, pair: LivePair) -> str:
        """The folder of a pair's register and log."""
        return str(Path(self.folder) / "pairs" / pair.mark) if pair.mark else self.folder

    def add(self, pair: LivePair) -> None:
        """Add a pair beside the active one, in place of any other; one that is there stays as it is.

        Its mark is chosen here.
        """
        digest = open_artifact(pair.index, kind="index").digest

        def beside(pairs: tuple[LivePair, ...]) -> tuple[LivePair, ...]:
            if any(each.index == pair.index for each in pairs):
                return pairs
            # One that comes again gets another mark: what it was given before it ended lacks later writes.
            mark = f"{digest[:MARK_CHARACTERS]}.{self._file().added + 1}"
            added = replace(pair, mark=mark, filled=False)
            shutil.rmtree(self.pair_folder(added), ignore_errors=True)  # of a call that was killed
            # Its register is there before any process reads that there is a pair.
            live_versions.current(self.pair_folder(added), pair.index, delta=True)
            return pairs[0], added

        self._change(beside)

    def set_filled(self, index: str) -> None:
        """Say that a pair has every write."""
        self._change(
            lambda pairs: tuple(replace(each, filled=each.filled or each.index == index) for each in pairs)
        )

    def end_others(self) -> tuple[str, ...]:
        """Leave the active pair alone: the others take no more writes. Returns their folders, which stay."""
        ended = self.pairs()[1:]
        self._change(lambda pairs: pairs[:1])
        return tuple(map(self.pair_folder, ended))

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
