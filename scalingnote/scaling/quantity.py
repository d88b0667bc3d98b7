"""Quantities that remember their arithmetic, so that what `plan --explain` prints is what was computed.

constants ─► a * b / c ─► Ledger.step(name, quantity) ─► a quantity of that name, used in the next step
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Literal

from scalingnote.scaling.constants import Constant


@dataclass(frozen=True)
class Quantity:
    """A value with the formula that gave it, in names and in numbers."""

    value: float
    names: str
    numbers: str
    constants: tuple[Constant, ...] = ()
    kind: Literal["single", "product", "sum"] = "single"  # decides where brackets are needed

    def __mul__(self, other: "Quantity") -> "Quantity":
        return _join(self, "×", other, self.value * other.value)

    def __truediv__(self, other: "Quantity") -> "Quantity":
        return _join(self, "/", other, self.value / other.value)

    def __add__(self, other: "Quantity") -> "Quantity":
        return _join(self, "+", other, self.value + other.value)

    def __sub__(self, other: "Quantity") -> "Quantity":
        return _join(self, "-", other, self.value - other.value)


@dataclass(frozen=True)
class Step:
    """One line of arithmetic."""

    name: str
    value: float
    unit: str
    names: str
    numbers: str
    constants: tuple[Constant, ...]  # that enter here


@dataclass
class Ledger:
    """The steps of a plan, in their order."""

    steps: list[Step] = field(default_factory=list)

    def step(self, name: str, quantity: Quantity, unit: str) -> Quantity:
        """Note a result, and go on with it under its name."""
        self.steps.append(
            Step(name, quantity.value, unit, quantity.names, quantity.numbers, quantity.constants)
        )
        return Quantity(quantity.value, name, number(quantity.value))

    @property
    def constants(self) -> list[Constant]:
        """All that entered, each once, in the order of their first use."""
        return list(dict.fromkeys(constant for step in self.steps for constant in step.constants))


def of(constant: Constant) -> Quantity:
    """A constant as a quantity."""
    return Quantity(constant.value, constant.name, number(constant.value), (constant,))


def plain(value: float) -> Quantity:
    """A number that needs no source: 1, hours of a month, bytes of a gigabyte."""
    return Quantity(value, number(value), number(value))


def up(quantity: Quantity, *, least: Quantity | None = None) -> Quantity:
    """The next whole number, but at least so many."""
    whole = float(ceil(quantity.value * (1 - 1e-12)))
    if least is None:
        return _call("ceil", [quantity], whole)
    return _call("max", [least, _call("ceil", [quantity], whole)], max(whole, least.value))


def root(quantity: Quantity) -> Quantity:
    """The square root."""
    return _call("sqrt", [quantity], sqrt(quantity.value))


def number(value: float) -> str:
    """Four figures where they suffice: 1,234 or 6.526e9."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def _join(left: Quantity, sign: Literal["×", "/", "+", "-"], right: Quantity, value: float) -> Quantity:
    kind: Literal["product", "sum"] = "product" if sign in "×/" else "sum"
    before = left.kind == "sum" and kind == "product"
    # a / (b × c) and a - (b + c): behind / and - brackets stay.
    after = (right.kind == "sum" and sign != "+") or (right.kind == "product" and sign == "/")
    names, numbers = (
        f"{_bracketed(getattr(left, text), before)} {sign} {_bracketed(getattr(right, text), after)}"
        for text in ("names", "numbers")
    )
    return Quantity(value, names, numbers, _merged([left, right]), kind)


def _bracketed(text: str, wanted: bool) -> str:
    return f"({text})" if wanted else text


def _call(function: str, arguments: Sequence[Quantity], value: float) -> Quantity:
    names, numbers = (
        f"{function}({', '.join(getattr(one, text) for one in arguments)})" for text in ("names", "numbers")
    )
    return Quantity(value, names, numbers, _merged(arguments))


def _merged(quantities: Sequence[Quantity]) -> tuple[Constant, ...]:
    return tuple(dict.fromkeys(constant for one in quantities for constant in one.constants))
