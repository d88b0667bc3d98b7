"""Array types of the signatures that a query encoder needs, without importing jaxtyping.

jaxtyping takes a third of the time of `from scalingnote import QueryEncoder`. A type checker sees its types,
and so does a program that imported it before, as the tests do to check shapes; for others they are `Any`.
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
