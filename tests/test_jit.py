from types import SimpleNamespace

import numba
import pytest

from scalingnote import jit


def test_where_nothing_can_be_written_loops_are_compiled_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*, nogil: bool, cache: bool = False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.jit(nopython=True, nogil=nogil)

    monkeypatch.setattr(jit, "numba", SimpleNamespace(njit=nowhere))
    assert jit.compiled(lambda number: number + 1)(1) == 2
