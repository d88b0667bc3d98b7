"""The private API of Ray that this package uses: a test fails if an upgrade of Ray has moved it."""

import inspect
import logging
import os
import warnings
from typing import Any

import pytest
import ray

from scalingnote.core import ray_internals

with warnings.catch_warnings():  # of pydantic, at import
    warnings.simplefilter("ignore")
    from ray import serve


def test_the_driver_of_a_job_has_a_variable(monkeypatch: pytest.MonkeyPatch):
    from ray.dashboard.modules.job import job_supervisor

    assert job_supervisor.RAY_JOB_CONFIG_JSON_ENV_VAR == "RAY_JOB_CONFIG_JSON_ENV_VAR"
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert not ray_internals.in_submitted_job()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert ray_internals.in_submitted_job()


def test_ray_uses_the_names_that_are_replaced_at_its_start(capfd):
    """Check that Ray uses these names; test_cluster.py tests their purpose and that they are restored."""
    from ray._private import node, ray_constants, services, worker

    assert {"ENABLE_RAY_CLUSTER", "ENABLE_RAY_CLUSTERS_ENV_VAR"} <= vars(ray_constants).keys()
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services)  # where addresses are chosen
    assert "services.get_node(" in inspect.getsource(node)
    original = worker.print_to_stdstream
    assert "print_to_stdstream" in inspect.getsource(worker.connect)
    with ray_internals.shown_worker_lines(lambda line: line.startswith("ours")):
        worker.print_to_stdstream({"lines": ["ours", "theirs"]})
    assert worker.print_to_stdstream is original
    assert capfd.readouterr().err == "ours\n"


def test_the_silenced_loggers_of_ray_data_exist():
    import ray.data._internal.execution.operators.map_operator as operators
    import ray.data._internal.execution.streaming_executor_state as state
    import ray.data._internal.progress as progress

    ray_internals.silence_data()
    for module in (operators, state, progress):
        assert logging.getLogger(module.__name__).level == logging.CRITICAL
    assert operators.logger.name == operators.__name__
    assert state.logger.name == state.__name__


def test_serve_without_a_controller_has_no_client(monkeypatch: pytest.MonkeyPatch):
    import ray.serve.context

    monkeypatch.setattr(ray.serve.context, "_global_client", None)
    monkeypatch.setattr(ray.serve.context, "_connect", lambda *_, **__: None)
    assert ray_internals.serve_client(required=False) is None


def test_an_application_lists_its_deployments():
    @serve.deployment(num_replicas=3, ray_actor_options={"num_cpus": 0.5})
    class Part: ...

    @serve.deployment
    class Whole:
        def __init__(self, part: Any) -> None: ...

    deployments = {each.name: each for each in ray_internals.serve_deployments(Whole.bind(Part.bind()))}
    assert sorted(deployments) == ["Part", "Whole"]
    assert deployments["Part"].num_replicas == 3
    assert deployments["Part"].ray_actor_options["num_cpus"] == 0.5


def test_ranks_on_one_machine_connect_through_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path):
    class Ranks:
        """A group of two ranks that run in this process."""

        def __len__(self) -> int:
            return 2

        def execute(self, work: Any) -> None:
            set_variables.append(work)

        def execute_single_async(self, rank: int, work: Any, *given: Any) -> Any:
            return work(*given)

    set_variables: list[Any] = []
    monkeypatch.setattr(ray, "get", lambda results: results)
    join_calls: list[tuple[Any, ...]] = []
    config = ray_internals.ranks_on_one_machine(str(tmp_path), lambda *given: join_calls.append(given))
    config.backend_cls().on_start(Ranks(), config)
    assert [given[:2] for given in join_calls] == [(0, 2), (1, 2)]
    (store,) = {given[2] for given in join_calls}
    assert os.path.dirname(store) == str(tmp_path)
    assert len(set_variables) == 1


def test_actors_of_ray_data_accept_the_number_of_tries():
    class Dataset:
        def map_batches(self, work: Any, **given: Any) -> dict[str, Any]:
            warnings.warn("dropped in 2.64", DeprecationWarning, stacklevel=1)
            return given

    assert ray_internals.map_with_one_try(Dataset(), object, batch_size=1)["max_task_retries"] == 0
    from ray.data._internal.execution.operators import actor_pool_map_operator

    assert '"max_task_retries" not in ray_remote_args' in inspect.getsource(actor_pool_map_operator)
