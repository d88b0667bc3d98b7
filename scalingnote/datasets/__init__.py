"""Data sets: readers of sources, checks of rows, splits, and the simulator of click logs."""
