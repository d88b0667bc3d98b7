"""The prepare stage of a platform's log on Ray: every step is a task for each slice or bucket.

No row passes through the driver or through Ray's object store: tasks read and write files, and what they
return is a record of a few hundred bytes. So the driver's memory depends on the number of slices and parts,
not on the length of the log.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ray
from ray.data import TaskPoolStrategy

from scalingnote import cluster
from scalingnote.config import Resources
from scalingnote.datasets.config import Logs
from scalingnote.datasets.logs import flow
from scalingnote.datasets.logs.inputs import plan
from scalingnote.storage.artifact import Artifact, Draft


def run(config: Logs, *, output: str) -> Artifact:
    """Build the `dataset` artifact of a log, or return it if it is there.

    DataError when a file lacks a column or nothing usable remains; single bad rows are set aside in
    `rejected.parquet` and counted by reason in the manifest (`rejected_by_reason`).
    """
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    slices = plan(config)
    cluster.check_resources(config.resources, knob="dataset.resources")
    return flow.build(config, draft, slices, each=partial(_each, resources=config.resources))


def _each(task: flow.Task, items: Sequence[Any], *, resources: Resources) -> Iterator[flow.Record]:
    shared = ray.put(items)
    numbers = [{"number": number} for number in range(len(items))]
    done = ray.data.from_items(numbers, override_num_blocks=len(numbers)).map(
        partial(_do, task=task, shared=shared),
        compute=TaskPoolStrategy(size=min(resources.workers, len(numbers))),
        num_cpus=resources.cpus_per_worker,
    )
    for row in cluster.dataset_rows(done):
        yield json.loads(row["record"])


def _do(row: dict[str, int], *, task: flow.Task, shared: Any) -> dict[str, str]:
    return {"record": json.dumps(task(ray.get(shared)[row["number"]]))}
