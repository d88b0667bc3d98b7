"""What an unfinished run of the prepare stage left is kept only while the input files are the same."""

import json
from collections.abc import Sequence
from typing import Any

from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import CLAIM, LEASE, Draft


def resume_or_clear(draft: Draft, plan: Sequence[dict[str, Any]]) -> None:
    """Delete the parts and records of a run on other slices, or on other versions of the files.

    Args:
        draft: of the data set.
        plan: the slices as JSON values; an empty one resumes nothing.
    """
    text = json.dumps(plan).encode()
    uri = draft.work("plan.json")
    if plan and fs.exists(uri) and fs.read_bytes(uri) == text:
        return
    draft.afresh()
    for file in fs.list_files(draft.work()):
        if file not in (CLAIM, LEASE):  # without them a second process would start to build the artifact
            fs.delete(draft.work(file))
    fs.write_bytes(uri, text)
