"""Versions of a live index, as the catalog of what is served: its own register says which is current."""

from dataclasses import dataclass

from scalingnote.errors import SearchError
from scalingnote.index.live import registry, versions
from scalingnote.serve.catalog import Serving, Version


@dataclass(frozen=True)
class LiveCatalog:
    """The folder of a live index, and the index it began with. Versions are named by their numbers."""

    folder: str
    index: str
    dim: int

    @property
    def state(self) -> str:
        """Where the active version is remembered."""
        return self.folder

    def read(self) -> Serving:
        """What is served now, the current version first, then those that it can be gone back to."""
        if not registry.exists(self.folder):
            versions.current(self.folder, self.index)  # which makes it
        listed = sorted(versions.listing(self.folder), key=lambda each: (not each.current, -each.number))
        found = [Version(str(v.number), v.uri, v.documents, self.dim, v.created) for v in listed]
        return Serving(tuple(found))

    def activate(self, version: Version) -> Serving:
        """Make a kept version the current one; every write is there in each of them."""
        kept = {each.name: each for each in self.read().versions}.get(version.name)
        if kept is None or kept.uri != version.uri:
            raise SearchError(
                f"{version.uri} is no version of this live index, which goes over to those that compaction "
                "makes: to serve another index, start an application of it with a live folder of its own"
            )
        versions.activate(self.folder, int(kept.name))
        return self.read()

    def previous(self) -> Version:
        """The newest version that is not current; SearchError when none is kept."""
        others = self.read().versions[1:]
        if not others:
            raise SearchError("no other version is kept: there is nothing to roll back to")
        return others[0]
