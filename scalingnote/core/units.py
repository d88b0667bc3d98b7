"""Units of memory and time."""

GIB = 2**30  # bytes
DAY_S = 86_400.0
