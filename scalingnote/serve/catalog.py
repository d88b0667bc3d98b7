"""Which versions of an index are served: one small file says so, and every process reads it.

    {state}/serving.json    the active version, those kept beside it to go back to, newest first

It is replaced as a whole, so a reader sees one state or the next. Nothing here opens an index.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from scalingnote.errors import ConfigError, SearchError
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import open_artifact

FILE = "serving.json"


@dataclass(frozen=True)
class Version:
    """An index artifact, named by the beginning of its digest."""

    name: str
    uri: str
    documents: int
    dim: int
    created: str

    @classmethod
    def of(cls, uri: str) -> "Version":
        """The version at a URI; ArtifactError when it is no index."""
        index = open_artifact(uri, kind="index")
        layout = index.read_json("index.json")
        created = str(index.manifest.info["created"])
        return cls(index.digest[:12], index.uri, layout["documents"], layout["dim"], created)


@dataclass(frozen=True)
class Serving:
    """What is served: `versions` has the active one first, then those that were active before it."""

    versions: tuple[Version, ...]

    @property
    def active(self) -> Version:
        """That which new requests are answered from."""
        return self.versions[0]

    def named(self, name: str) -> Version:
        """A kept version; SearchError when there is none of that name."""
        for version in self.versions:
            if version.name == name:
                return version
        kept = ", ".join(version.name for version in self.versions)
        raise SearchError(f"no version {name!r}: kept are {kept}; to serve another index, send its uri")


@dataclass(frozen=True)
class Catalog:
    """The file, and what is served as long as there is none."""

    first: Version
    state: str | None = field(default=None)  # folder or URI; None: nothing can be activated
    kept: int = 2
    pinned: tuple[Version, ...] = ()  # of arms that name an index: served whatever is active

    def read(self) -> Serving:
        """What is served now."""
        activated = self._activated()
        names = {version.name for version in activated}
        return Serving((*activated, *(each for each in self.pinned if each.name not in names)))

    def activate(self, version: Version) -> Serving:
        """Make a version the active one; those that were active before it stay, as many as are kept.

        ConfigError without a place to remember it in, or when its embeddings have another dimension.
        """
        if self.state is None:
            raise ConfigError("no index can be activated: set serve.state to a folder that all nodes reach")
        before = self.read()
        if version.dim != before.active.dim:
            raise ConfigError(
                f"index {version.name} has embeddings of dim {version.dim}, the query tower of "
                f"{before.active.dim}: not a pair"
            )
        others = [each for each in self._activated() if each.name != version.name]
        content = {"versions": [asdict(each) for each in (version, *others)[: self.kept]]}
        fs.write_bytes(fs.join(self.state, FILE), json.dumps(content, indent=1).encode())
        return self.read()

    def previous(self) -> Version:
        """The version to roll back to; SearchError when none is kept."""
        activated = self._activated()
        if len(activated) < 2:
            raise SearchError("no earlier version is kept: there is nothing to roll back to")
        return activated[1]

    def _activated(self) -> tuple[Version, ...]:
        if self.state is None or not fs.exists(place := fs.join(self.state, FILE)):
            return (self.first,)
        found: dict[str, Any] = json.loads(fs.read_bytes(place))
        return tuple(Version(**version) for version in found["versions"])
