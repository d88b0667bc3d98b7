"""ScalingNote: a published or trained embedding model for documents, and a query tower at almost no cost.

    from scalingnote import Index, QueryEncoder, build_index, distill

The names are loaded at their first use, so `import scalingnote` takes almost no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

from scalingnote.core import __version__

if TYPE_CHECKING:
    from scalingnote.api import Index, QueryEncoder, Result, agreement, build_index, distill

__all__ = ["Index", "QueryEncoder", "Result", "__version__", "agreement", "build_index", "distill"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("scalingnote.api"), name)
    raise AttributeError(f"module 'scalingnote' has no attribute {name!r}")
