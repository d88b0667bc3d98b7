"""An index of the documents in the SHARDS of a module, built once, and a live index over it for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live_shards import index
from scalingnote.index.live import wal
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.storage.artifact import Artifact


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return index(f"{tmp_path_factory.mktemp('built')}/index", request.module.SHARDS)


@pytest.fixture
def live(built: Artifact, tmp_path: Path) -> LiveIndex:
    return LiveIndex(tmp_path / "live", built.uri)


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Iterator[None]:
    """Make logs consist of many files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wal, "SEGMENT_BYTES", 2000)
        yield
