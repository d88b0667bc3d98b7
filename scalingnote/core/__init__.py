"""Foundations of every other package, the version of the package, and units of memory and time."""

__version__ = "0.1.0"

GIB = 2**30  # bytes
DAY_S = 86_400.0
