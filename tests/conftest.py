"""What every test shares: shape checks on, no network, one Ray cluster for the whole session."""

import os
import socket
from collections.abc import Iterator

with socket.socket() as _probe:
    _probe.bind(("127.0.0.1", 0))
    S3_PORT = _probe.getsockname()[1]
# Before anything imports them: no model hub, single-threaded maths
# (two Ray workers on two cores would otherwise fight over them).
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    SCALINGNOTE_PRECISION="float32",  # also where the CPU has tiles for bfloat16: results are compared
    TOKENIZERS_PARALLELISM="false",
    RAY_DEDUP_LOGS="0",
    # Ray's workers inherit the environment their cluster starts with: where a test's object store will be.
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

# Ray Serve makes other classes of serve's, Haystack of the integrations'; their arguments may be of files.
UNCHECKED = {"serve", "integrations"}
install_import_hook(
    [f"scalingnote.{each.name}" for each in iter_modules(scalingnote.__path__) if each.name not in UNCHECKED],
    "beartype.beartype",
)
# A busy machine is no failure. Examples are the same in every run, but with `--hypothesis-profile explore`.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def s3_port() -> int:
    """Where the workers of :func:`cluster` look for S3."""
    return S3_PORT


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A private two-CPU Ray cluster; ask for it in every test that starts Ray work in process."""
    import ray

    from scalingnote.core import cluster

    cluster.connect()
    yield
    ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest timeouts come first: then both test processes end at about the same time."""
    longest_s = dict.fromkeys((item.path for item in items), 0.0)
    for item in items:
        own = item.get_closest_marker("timeout")
        longest_s[item.path] = max(longest_s[item.path], own.args[0] if own else 0.0)
    items.sort(key=lambda item: -longest_s[item.path])
