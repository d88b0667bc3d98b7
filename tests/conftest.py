"""Setup of all tests: shape checks are on, no network, one Ray cluster for the session."""

import os
import socket
from collections.abc import Iterator

with socket.socket() as _probe:
    _probe.bind(("127.0.0.1", 0))
    S3_PORT = _probe.getsockname()[1]
# Before any import of these libraries: no model hub, single-threaded mathematics (two Ray workers share two
# cores).
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    SCALINGNOTE_PRECISION="float32",  # also if the CPU has tiles for bfloat16: results are compared
    TOKENIZERS_PARALLELISM="false",
    RAY_DEDUP_LOGS="0",
    # Ray's workers inherit the environment of their cluster's start: the address of the tests' object store.
    AWS_ENDPOINT_URL=f"http://127.0.0.1:{S3_PORT}",
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
)

from pkgutil import iter_modules

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

import scalingnote

# Ray Serve replaces classes of serve, Haystack those of integrations; their arguments may come from files.
UNCHECKED = {"serve", "integrations"}
install_import_hook(
    [f"scalingnote.{each.name}" for each in iter_modules(scalingnote.__path__) if each.name not in UNCHECKED],
    "beartype.beartype",
)
# A busy machine is not a failure. Examples are the same in all runs except `--hypothesis-profile explore`.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def s3_port() -> int:
    """Return the port at which the workers of :func:`cluster` expect S3."""
    return S3_PORT


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start a private Ray cluster with two CPUs; every test that starts Ray work in process needs it."""
    import ray

    from scalingnote.core import cluster

    cluster.connect()
    yield
    ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files with the longest timeouts first, so that both test processes end at about the same time."""
    longest_s = dict.fromkeys((item.path for item in items), 0.0)
    for item in items:
        timeout = item.get_closest_marker("timeout")
        longest_s[item.path] = max(longest_s[item.path], timeout.args[0] if timeout else 0.0)
    items.sort(key=lambda item: -longest_s[item.path])
