"""Files of public data sets: located in `$SCALINGNOTE_DATA` or the user's cache, else downloaded and checked.

Every URL names a commit and every file has a sha256, so that results stay reproducible.
"""

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalingnote.datasets.raw_rows import Source
from scalingnote.errors import DataError
from scalingnote.log import Progress, get_logger

_BLOCK_BYTES = 1 << 18
_TIMEOUT_S = 30


@dataclass(frozen=True)
class Remote:
    """A file to download.

    `sha256` is None only if the server builds the file on each request (an archive of a commit); then
    `convert` checks the converted files instead.
    """

    name: str
    url: str
    sha256: str | None


def copy_files(downloads: Path, target: Path) -> None:
    """The conversion of files that are read as they were downloaded."""
    for path in sorted(downloads.iterdir()):
        shutil.copyfile(path, target / path.name)


@dataclass(frozen=True)
class Description:
    """What a data set is; `languages` and `licence` are "any" and "yours" for readers of the user's files."""

    name: str
    summary: str
    languages: str = "any"
    licence: str = "yours"
    downloaded: bool = True  # whether it has files to download


@dataclass(frozen=True)
class DownloadedSource:
    """A public data set: its downloads, their conversion to `files`, and the reader of these files."""

    about: Description
    files: tuple[str, ...]
    remotes: tuple[Remote, ...]
    read: Callable[[Path], Source]  # takes the directory of `files`
    convert: Callable[[Path, Path], None] = copy_files  # (downloads, target directory)


def github(repository: str, commit: str, path: str) -> str:
    """URL of a file's bytes at a commit."""
    return f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"


def cache_directory() -> Path:
    """`$SCALINGNOTE_CACHE`, else ~/.cache/scalingnote."""
    return Path(os.environ.get("SCALINGNOTE_CACHE") or Path.home() / ".cache" / "scalingnote")


def locate(name: str, files: Sequence[str]) -> Path | None:
    """The directory that has all `files` of a data set: `$SCALINGNOTE_DATA/name`, else that of the cache."""
    local = os.environ.get("SCALINGNOTE_DATA")
    for base in ([Path(local)] if local else []) + [cache_directory()]:
        if all((base / name / file).is_file() for file in files):
            return base / name
    return None


def fetch(
    name: str, *, files: Sequence[str], remotes: Sequence[Remote], convert: Callable[[Path, Path], None]
) -> Path:
    """The directory of a data set, which is downloaded first if it is neither local nor cached.

    `convert(downloads, target)` turns the downloaded files into `files`. They appear in the cache all at
    once; until then, the downloads stay under ``downloads/``, so that a second try resumes.
    """
    directory = locate(name, files)
    if directory:
        return directory
    base = cache_directory()
    downloads = base / "downloads" / name
    for remote in remotes:
        download(remote, downloads, remedy=f"put {', '.join(files)} into $SCALINGNOTE_DATA/{name}/")
    base.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=base))
    try:
        convert(downloads, target)
        shutil.rmtree(base / name, ignore_errors=True)  # incomplete, or `locate` would have returned it
        target.rename(base / name)
    except Exception:
        for remote in remotes:  # a damaged file without sha256 would fail on every later try
            if remote.sha256 is None:
                (downloads / remote.name).unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(downloads)
    get_logger("datasets").info("%s is at %s", name, base / name)
    return base / name


def download(remote: Remote, directory: Path, *, remedy: str) -> Path:
    """Download one file into `directory`: resume a partial download, check the sha256, rename it to its name.

    Raises:
        DataError: the server fails, the file is cut short (a second try resumes it) or its sha256 is wrong.
    """
    target, partial = directory / remote.name, directory / f"{remote.name}.part"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            resumed = have > 0 and response.status == 206
            total = int(response.headers.get("Content-Length") or 0) + (have if resumed else 0)
            done = have if resumed else 0
            with (
                partial.open("ab" if resumed else "wb") as stream,
                Progress("datasets", total=total >> 10, unit="KiB", done=done >> 10) as progress,
            ):
                while block := response.read(_BLOCK_BYTES):
                    stream.write(block)
                    progress.advance(len(block) >> 10, remote.name)
        have = partial.stat().st_size  # urllib reports no error if the connection closes early
        if have < total:
            raise DataError(f"{remote.url} sent {have:,} of {total:,} bytes: try again, or {remedy}")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: the partial file is already complete
            raise DataError(f"{remote.url} answered {error.code} {error.reason}: {remedy}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"cannot download {remote.url} ({reason}): go online, or {remedy}") from None
    if remote.sha256:
        check(partial, remote.sha256, remedy=f"download it again, or {remedy}", damaged=partial.unlink)
    partial.replace(target)
    return target


def check(path: Path, sha256: str, *, remedy: str, damaged: Callable[[], None] = lambda: None) -> None:
    """DataError, after calling `damaged`, unless the file has this sha256."""
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != sha256:
        damaged()
        raise DataError(f"{path.name} has sha256 {actual}, expected {sha256}: {remedy}")
