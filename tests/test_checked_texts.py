"""Texts from callers: what is none is an error that names it, half of a surrogate pair is U+FFFD."""

import jaxtyping
import numpy as np
import pytest

from scalingnote.errors import DataError
from scalingnote.texts import checked_text, checked_texts


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations are not checked, as outside of tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "query 1 is None of type NoneType: give a text, an empty one"),
        (float("nan"), "query 1 is nan of type float"),
        (np.float64("nan"), "query 1 is .*nan.* of type float64"),
        (7, "query 1 is 7 of type int"),
        (b"bytes", "query 1 is b'bytes' of type bytes"),
        (["a"], r"query 1 is \['a'\] of type list"),
        ("x" * 5, None),
        (np.str_("x"), None),
    ],
)
def test_what_is_no_text_is_named(wrong, message):
    if message is None:
        assert checked_texts(["fine", wrong], name="query") == ["fine", wrong]
        return
    with pytest.raises(DataError, match=message):
        checked_texts(["fine", wrong], name="query")


@pytest.mark.parametrize("wrong", ["one text", b"bytes", None, 7])
def test_one_value_is_no_list(wrong):
    with pytest.raises(DataError, match="in place of a list of texts"):
        checked_texts(wrong)


def test_halves_of_surrogate_pairs_are_replaced():
    given = ["cut \ud83d", "\ude00", "whole \U0001f600", "हिन्दी", "bytes \udcff of a shell", ""]
    expected = ["cut \ufffd", "\ufffd", "whole \U0001f600", "हिन्दी", "bytes \ufffd of a shell", ""]
    assert checked_texts(given) == checked_texts(np.array(given, object)) == expected
    assert given[0] == "cut \ud83d"  # the caller's list is his own
    assert checked_texts(iter(given)) == expected
    assert checked_text(given[0]) == expected[0]
    assert checked_texts([]) == []
