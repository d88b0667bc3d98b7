"""Encoding without Ray, for tests of what is encoded: that it runs on Ray is tested once."""

from collections.abc import Iterator, Sequence

import pytest
import ray

from scalingnote.encode import job
from scalingnote.encode.config import Fleet
from scalingnote.encode.steps import Steps


def encode_here(patch: pytest.MonkeyPatch) -> None:
    """From now on parts are encoded in this process, one after the other, and so are slices worked on."""
    patch.setattr(job, "_run_wave", _run_wave)
    patch.setattr(job.cluster, "require", lambda *_, **__: None)
    patch.setattr(job.cluster, "each", map)


def _run_wave(steps: Steps, todo: Sequence[str], resources: Fleet, **where: str) -> Iterator[dict[str, str]]:
    steps = ray.cloudpickle.loads(ray.cloudpickle.dumps(steps))  # as they reach a worker
    encode = job.EncodeParts(steps=steps, threads=1.0, commit=where)
    for name in todo:
        yield {key: column[0] for key, column in encode({"name": [name]}).items()}
