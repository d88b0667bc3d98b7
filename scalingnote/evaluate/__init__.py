"""Reads the artifacts of any stage and says how good they are."""
