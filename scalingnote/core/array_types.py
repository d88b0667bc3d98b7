"""Array types of the signatures that a query encoder needs, without importing jaxtyping.

The import of jaxtyping takes a third of the time of `from scalingnote import QueryEncoder`. A type checker
gets the types of jaxtyping. A program that has imported jaxtyping before (for example the tests, which check
shapes) gets them too. In other programs they are `Any`.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.modules.get("jaxtyping"):
    from jaxtyping import Float, Float32, Float64, Int, Int16, Int64, Shaped
else:

    class _Unchecked:
        def __class_getitem__(cls, _: Any) -> Any:
            return Any

    Float = Float32 = Float64 = Int = Int16 = Int64 = Shaped = _Unchecked

__all__ = ["Float", "Float32", "Float64", "Int", "Int16", "Int64", "Shaped"]
