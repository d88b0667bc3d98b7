"""The pairs of a live folder: indexes of more than one model, each with a delta that has every write.

    folder/pairs.json   the pairs, the active one first; without the file there is the one of the run
    folder              register and log of the first pair
    folder/pairs/MARK   register and log of another one; MARK is its index's digest, cut, and its number

A pair is added by `scalingnote migrate` once its index is built. From then on the writer gives it each write,
and what was written before as well; then it is *filled*, and a service may change to it and back. The file
is replaced as a whole, by one process at a time, so writer, encoders, searchers and gateways read what is so.
"""

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from scalingnote.core.errors import ConfigError
from scalingnote.index.live import versions as live_versions
from scalingnote.index.live.wal import make_folder
from scalingnote.index.shard import open_layout
from scalingnote.serve.pairs import PairedTowers, towers_of
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

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "DocumentPathParts":
        """The parts that a file lists."""
        places = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | places)


@dataclass(frozen=True)
class LivePair:
    """An index, what encodes for it, and where its writes are."""

    index: str  # URI of the index that was built
    documents: DocumentPathParts | None = None  # None: nothing is written
    towers: PairedTowers | None = None  # None: those that the manifest of its index names
    mark: str = ""  # names its folder, and begins the names of its versions; none of the first pair
    filled: bool = True  # whether its delta has every write

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "LivePair":
        """A pair that the file lists."""
        documents, towers = values["documents"], values["towers"]
        parts = documents and DocumentPathParts.parse(documents)
        return cls(**values | {"documents": parts, "towers": towers and PairedTowers.parse(towers)})

    def named_towers(self) -> PairedTowers | None:
        """The towers that encode for the index."""
        return self.towers or _towers(self.index)

    def version_name(self, number: int) -> str:
        """The name of a version of its register."""
        return f"{self.mark}-{number}" if self.mark else str(number)


@dataclass(frozen=True)
class LivePairs:
    """The pairs of a folder, as every process finds them; `first` is the only one until another is added."""

    root: str
    first: LivePair

    def read(self) -> tuple[LivePair, ...]:
        """The pairs, the active one first."""
        return tuple(map(LivePair.parse, self._file()["pairs"])) or (self.first,)

    def changed_at(self) -> int:
        """When the pairs changed last, in nanoseconds; 0: no pair was ever added."""
        try:
            return (Path(self.root) / LIVE_PAIRS_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def folder(self, pair: LivePair) -> str:
        """The folder of a pair's register and log."""
        return str(Path(self.root) / "pairs" / pair.mark) if pair.mark else self.root

    def place(self, version: str) -> tuple[str, int]:
        """The folder of a version's register, and its number there; ConfigError where its pair is gone."""
        mark, _, number = version.rpartition("-")
        for pair in self.read():
            if pair.mark == mark:
                return self.folder(pair), int(number)
        raise ConfigError(f"{self.root} has no version {version} any more: another model took its place")

    def add(self, pair: LivePair) -> None:
        """Add a pair beside the active one, in place of any other; one that is there stays as it is.

        Its mark is chosen here.
        """
        digest = open_artifact(pair.index, kind="index").digest

        def beside(pairs: tuple[LivePair, ...]) -> tuple[LivePair, ...]:
            if any(each.index == pair.index for each in pairs):
                return pairs
            # One that comes again gets another mark: what it was given before it ended lacks later writes.
            mark = f"{digest[:MARK_CHARACTERS]}.{self._file()['added'] + 1}"
            added = replace(pair, mark=mark, filled=False)
            shutil.rmtree(self.folder(added), ignore_errors=True)  # of a call that was killed
            # Its register is there before any process reads that there is a pair.
            live_versions.current(self.folder(added), pair.index, delta=True)
            return pairs[0], added

        self._change(beside)

    def set_filled(self, index: str) -> None:
        """Say that a pair has every write."""

        def with_filled(pairs: tuple[LivePair, ...]) -> tuple[LivePair, ...]:
            return tuple(replace(each, filled=each.filled or each.index == index) for each in pairs)

        self._change(with_filled)

    def activate(self, folder: str) -> None:
        """Put the pair of a folder first."""
        self._change(lambda pairs: tuple(sorted(pairs, key=lambda each: self.folder(each) != folder)))

    def end_others(self) -> tuple[str, ...]:
        """Leave the active pair alone: the others take no more writes. Returns their folders, which stay."""
        ended = self.read()[1:]
        self._change(lambda pairs: pairs[:1])
        return tuple(map(self.folder, ended))

    def _file(self) -> dict[str, Any]:
        """What the file says: the pairs, none until one is added, and how many were ever added."""
        try:
            found: dict[str, Any] = json.loads(
                (Path(self.root) / LIVE_PAIRS_FILE).read_text(encoding="utf-8")
            )
        except FileNotFoundError:
            return {"added": 0, "pairs": []}
        return found

    def _change(self, change: Callable[[tuple[LivePair, ...]], tuple[LivePair, ...]]) -> None:
        make_folder(Path(self.root))
        path = Path(self.root) / LIVE_PAIRS_FILE
        with Path(f"{path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by closing
            before = self.read()
            after = change(before)
            if after == before:
                return
            added = self._file()["added"] + len(
                {each.mark for each in after} - {each.mark for each in before}
            )
            listed = {"added": added, "pairs": [asdict(each) for each in after]}
            fs.replace_durably(path, json.dumps(listed, indent=1))


@lru_cache(maxsize=64)  # versions are listed many times a second
def _towers(index: str) -> PairedTowers | None:
    return towers_of(open_artifact(index, kind="index"))


@lru_cache(maxsize=64)
def dim_of(index: str) -> int:
    """Dimension of the embeddings of an index."""
    return open_layout(open_artifact(index, kind="index")).dim
