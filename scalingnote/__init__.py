"""ScalingNote: a published or trained embedding model for documents, a query tower that costs almost nothing.

    from scalingnote import Index, QueryEncoder, build_index, distill

The names are loaded when they are first used: `import scalingnote` costs nothing.
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
