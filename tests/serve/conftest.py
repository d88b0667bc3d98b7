"""One small index and query tower for all tests of serving."""

import warnings

import pytest

with warnings.catch_warnings():
    # Ray declares fields in a way that pydantic deprecates, and warnings are errors here.
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401

from pair import built, student

from scalingnote.storage.artifact import Artifact


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="session")
def query_tower(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return student(f"{tmp_path_factory.mktemp('student')}/student")
