"""One small index and query tower for all tests of serving, and a run with two models."""

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    # Ray declares fields in a way that pydantic deprecates, and warnings are errors here.
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401

from pair import built, student

from scalingnote.storage.artifact import Artifact
from two_models import compare, indexed_run


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="session")
def query_tower(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return student(f"{tmp_path_factory.mktemp('student')}/student")


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with another model that is built and compared, not served. A test undoes its changes."""
    run_dir, other = indexed_run(tmp_path_factory.mktemp("compared"))
    compare(run_dir, other)
    return run_dir
