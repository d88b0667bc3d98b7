"""Which prompt a tower reads before the texts of a task of mteb, by mteb's own names and order of prompts."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalingnote.models import published_model


@dataclass(frozen=True)
class Prompts:
    """What is read before the texts of a task."""

    # Names as mteb resolves them: TASK-query, TASK, TYPE-query, TYPE, query; and the same with document.
    named: Mapping[str, str]
    # Of queries where no name fits: text with {instruction}, for the instruction that mteb has of a task.
    template: str | None = None

    def prefix(self, task: Any, role: str | None) -> str | None:
        """The prefix for a task (mteb's TaskMetadata, or None) and a role; None: the model's own."""
        if (name := prompt_name(self.named, task, role)) is not None:
            return self.named[name]
        if self.template is None or role == "document":
            return None
        stated = getattr(task, "prompt", None)
        instruction = stated.get("query") if isinstance(stated, Mapping) else stated
        return self.template.replace("{instruction}", instruction) if instruction else None


def prompt_name(names: Container[str], task: Any, role: str | None) -> str | None:
    """The first of mteb's names of a task's prompt that is in `names`; None if none is."""
    bases = [] if task is None else [task.name, task.type]
    offered = [*(each for base in bases for each in (f"{base}-{role}", base)), role]
    return next((name for name in offered if name is not None and name in names), None)


def task_prompts(folder: Path) -> dict[str, str]:
    """The prompts that a published folder names for tasks; those of its roles the towers read anyway."""
    named: Mapping[str, str | None] = published_model.model_settings(folder).get("prompts") or {}
    roles = ("query", "document", "passage", "corpus")
    return {name: text for name, text in named.items() if text and name not in roles}
