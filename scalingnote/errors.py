"""The exceptions this package raises: what is wrong, the value found, and the remedy, in that order."""

import difflib
from collections.abc import Iterable


class ScalingNoteError(Exception):
    """Base of every error that the user can fix; the CLI prints it without a traceback."""


class ConfigError(ScalingNoteError):
    """A configuration that cannot be run: an unknown key, a value out of bounds, two settings at odds."""


class DataError(ScalingNoteError):
    """Input that cannot be used at all: a missing file, a missing column, no usable row."""


class ArtifactError(ScalingNoteError):
    """An artifact that must not be read: unfinished, of another kind, or with wrong checksums."""


class TrainingError(ScalingNoteError):
    """Training that cannot go on: a loss that is not finite, ranks that disagree, a lost checkpoint."""


class EncodingError(ScalingNoteError):
    """Encoding that cannot go on: its parts fail at every retry."""


class SearchError(ScalingNoteError):
    """A search that cannot be answered: a missing shard, a vector of the wrong dimension."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'NAME'?`` with the most similar of the known names; empty if none is similar."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
