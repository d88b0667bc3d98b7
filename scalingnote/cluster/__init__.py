"""The connection to Ray, checks of its resources, tasks and actors."""

from scalingnote.cluster.connection import connect, is_private, restored_interrupt_handler
from scalingnote.cluster.tasks import (
    RETRY_OPTIONS,
    Loaded,
    actor_options,
    check_resources,
    check_resources_early,
    dataset_rows,
    error_column,
    execution_errors,
    map_loaded,
    map_tasks,
    map_tasks_in_order,
    map_with_actors,
    task_result,
)

__all__ = [
    "RETRY_OPTIONS",
    "Loaded",
    "actor_options",
    "check_resources",
    "check_resources_early",
    "connect",
    "dataset_rows",
    "error_column",
    "execution_errors",
    "is_private",
    "map_loaded",
    "map_tasks",
    "map_tasks_in_order",
    "map_with_actors",
    "restored_interrupt_handler",
    "task_result",
]
