"""Exceptions of this package; a message states the problem, the wrong value and the remedy, in this order."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

# Import names of packages that the core install leaves out, by the extra that installs them.
OFFLINE_PACKAGES = ("ir_measures", "jinja2", "matplotlib", "tensorboard")
ONLINE_PACKAGES = ("fastapi", "google", "grpc", "starlette", "uvicorn")
COMMON_PACKAGES = (
    *("Stemmer", "bm25s", "faiss", "fsspec", "jaxtyping", "numba", "obstore", "pandas"),
    *("peft", "pyarrow", "ray", "rich", "rjieba", "scipy", "torch", "transformers"),
)


class ScalingNoteError(Exception):
    """Base of every error that the user can fix; the CLI prints it without a traceback."""


class ConfigError(ScalingNoteError):
    """A configuration that cannot be run: an unknown key, a value out of bounds, two settings in conflict."""


class DataError(ScalingNoteError):
    """Input that cannot be used at all: a missing file, a missing column, no usable row."""


class ArtifactError(ScalingNoteError):
    """An artifact that must not be read: unfinished, of another kind, or with wrong checksums."""


class TrainingError(ScalingNoteError):
    """Training that cannot go on: a loss that is not finite, ranks that disagree, a lost checkpoint."""


class PartsFailedError(ScalingNoteError):
    """Parts of a stage that failed at every try; `reasons` maps the number of a part to its reason."""

    def __init__(self, text: str, reasons: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.reasons = dict(reasons or {})


class EndpointError(ScalingNoteError):
    """An embedding model behind HTTP that refuses the key, the model or all texts, or does not answer."""


class SearchError(ScalingNoteError):
    """A search that cannot be answered: a missing shard, a vector of the wrong dimension."""


class DatabaseError(ScalingNoteError):
    """A vector database that fails or does not answer in time; a later attempt may succeed."""


class MissingPackageError(ScalingNoteError):
    """A package that the core install leaves out."""


@contextmanager
def explained_imports() -> Iterator[None]:
    """Raise MissingPackageError with the extra to install, if the block imports a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package_name = (error.name or "").partition(".")[0]
        train, serve = "pip install 'scalingnote[train]'", "pip install 'scalingnote[serve]'"
        remedies = {
            **dict.fromkeys(OFFLINE_PACKAGES, train),
            **dict.fromkeys(ONLINE_PACKAGES, serve),
            **dict.fromkeys(
                COMMON_PACKAGES, f"{train} to distil, train and index, {serve} to search and serve"
            ),
        }
        if package_name not in remedies:
            raise
        raise MissingPackageError(
            f"this needs {package_name}, which the core install leaves out: {remedies[package_name]}"
        ) from error


def did_you_mean(name: str, known: Iterable[str], *, places: Mapping[str, str] | None = None) -> str:
    """Return ``; did you mean 'NAME'?`` with the most similar of the known names; empty if none is similar.

    With `places`, NAME is the place of that name.
    """
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {(places or {}).get(near[0], near[0])!r}?" if near else ""
