"""What every test shares: shape checks on, no network, one Ray cluster for the whole session."""

import os
from collections.abc import Iterator

# Before anything imports them: no model hub, no token file in the user's home, single-threaded maths
# (two Ray workers on two cores would otherwise fight over them).
os.environ.update(
    HF_HUB_OFFLINE="1",
    RAY_AUTH_MODE="disabled",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    RAY_DEDUP_LOGS="0",
)

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

install_import_hook("scalingnote", "beartype.beartype")
# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A private two-CPU Ray cluster; ask for it in every test that starts Ray work in process."""
    import ray

    from scalingnote import cluster

    cluster.connect()
    yield
    ray.shutdown()
