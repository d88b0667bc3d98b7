"""The data sets by name: what they are, where their files come from, how they are read.

Public files are in `$SCALINGNOTE_DATA` or the user's cache, else downloaded. Every URL names a commit and
every file has a sha256, so that results stay reproducible.
"""

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from scalingnote.datasets import file_formats, public_datasets, python_docs, row_checks
from scalingnote.datasets.config import AnyDataset, DatasetConfig
from scalingnote.datasets.raw_rows import Quarantine, Row, Rows, Source
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import Progress, get_logger

log = get_logger("datasets")
_BLOCK_BYTES = 1 << 18
_TIMEOUT_S = 30


@dataclass(frozen=True)
class Remote:
    """A file to download.

    `sha256` is None only if the server builds the file on each request (an archive of a commit); then the
    converted files are checked instead.
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
    downloaded: bool = False  # whether it has files to download


@dataclass(frozen=True, eq=False)
class DownloadedSource:
    """A public data set: the conversion of its downloads to `files`, and the reader of these files."""

    about: Description
    files: tuple[str, ...]
    read: Callable[[Path], Source]  # takes the directory of `files`
    convert: Callable[[Path, Path], None] = copy_files  # (downloads, target directory)
    converted_sha256: Mapping[str, str] = field(default_factory=dict)  # of `files`, where no download has one

    def remotes(self) -> tuple[Remote, ...]:
        """Its lines of ``public_files.txt``."""
        listed = resources.files("scalingnote.datasets").joinpath("public_files.txt").read_text().splitlines()
        rows = [line.split() for line in listed if line.startswith(f"{self.about.name} ")]
        return tuple(Remote(row[1], _github(*row[3:]), None if row[2] == "-" else row[2]) for row in rows)


def _github(repository: str, commit: str, path: str) -> str:
    if path == "archive":
        return f"https://github.com/{repository}/archive/{commit}.zip"
    return f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"


_PUBLIC = (
    DownloadedSource(
        Description(
            "medquad", "16,407 medical question-answer pairs from 9 NIH collections", "en", "CC BY 4.0", True
        ),
        files=("qa.jsonl",),
        read=public_datasets.read_medquad,
        convert=public_datasets.convert_medquad,
        converted_sha256={"qa.jsonl": "e7611999c3d32912ade836b649bc42c97233a9c7b37973b4427147fbefbc5baf"},
    ),
    DownloadedSource(
        Description(
            "stackexchange_devops",
            "3,700 questions and 4,968 answers of devops.stackexchange.com, graded by acceptance and votes",
            "en",
            "CC BY-SA 4.0",
            True,
        ),
        files=("questions.jsonl", "answers.jsonl"),
        read=public_datasets.read_devops,
        convert=public_datasets.convert_devops,
    ),
    DownloadedSource(
        Description(
            "chorus_icecat",
            "19,406 products of an electronics shop, 135 queries judged 0-3",
            "en",
            "Apache-2.0; product data Icecat Open Content License",
            True,
        ),
        files=("products.jsonl", public_datasets.ICECAT_JUDGEMENTS),
        read=public_datasets.read_icecat,
        convert=public_datasets.convert_icecat,
    ),
    DownloadedSource(
        Description(
            "zh_reading_titles",
            "titled paragraphs with human questions: DRCD, CMRC 2018, XQuAD-zh",
            "zh",
            "CC BY-SA 3.0 and 4.0",
            True,
        ),
        files=public_datasets.TITLES_FILES,
        read=public_datasets.read_titles,
    ),
    DownloadedSource(
        Description("zh_medical_qa", "7,644 medical questions with department and answer", "zh", "MIT", True),
        files=(public_datasets.MEDICAL_FILE,),
        read=public_datasets.read_medical,
    ),
    DownloadedSource(
        Description(
            "dureader_demo_zh",
            "200 labelled web queries and 1,393 result pages with engine ranks and an annotator's selection",
            "zh",
            "Apache-2.0",
            True,
        ),
        files=public_datasets.DUREADER_FILES,
        read=public_datasets.read_dureader,
        convert=public_datasets.convert_dureader,
    ),
)
DOWNLOADED = {source.about.name: source for source in _PUBLIC}
_PYTHON_DOCS = Description(
    "python_docs",
    "documentation of the installed Python packages; queries are docstrings' first sentences",
    "en",
    "each package's own",
)
_USER_FILES = (
    Description("beir", "a directory in the BEIR layout"),
    Description("msmarco", "files in the MS MARCO passage layout"),
    Description("columns", "JSON-lines or Parquet files with a column mapping"),
    Description(
        "texts", "documents alone, without queries: JSON lines, Parquet, tabs, text lines, folders of them"
    ),
    Description("logs", "a platform's documents and impression log, of any size, split by time"),
)
_DESCRIPTIONS = {
    about.name: about
    for about in (_PYTHON_DOCS, *(source.about for source in DOWNLOADED.values()), *_USER_FILES)
}


def names() -> list[str]:
    """The names of all data sets, those that need no settings first."""
    return list(_DESCRIPTIONS)


def describe(name: str) -> Description:
    """The description of a data set; ConfigError for an unknown name."""
    if name not in _DESCRIPTIONS:
        raise ConfigError(f"no data set {name!r}: choose one of {', '.join(names())}")
    return _DESCRIPTIONS[name]


def available(name: str) -> bool:
    """Whether `name` can be read without a download."""
    return not describe(name).downloaded or locate(name, DOWNLOADED[name].files) is not None


def fetch(name: str) -> Path:
    """The directory of a public data set, which is downloaded if it is not yet there."""
    if not describe(name).downloaded:
        raise ConfigError(
            f"{name} has nothing to fetch: its files are named in the config, or it is built in"
        )
    source = DOWNLOADED[name]

    def convert(downloads: Path, target: Path) -> None:
        source.convert(downloads, target)
        for file, sha256 in source.converted_sha256.items():
            check(target / file, sha256, remedy="the archive is not the commit it should be")

    return fetch_files(name, files=source.files, remotes=source.remotes(), convert=convert)


def read(config: AnyDataset) -> Source:
    """Raw rows of the data set that a config names."""
    if config.name in DOWNLOADED:
        return DOWNLOADED[config.name].read(fetch(config.name))
    readers: dict[str, Callable[[Any], Source]] = {
        "python_docs": python_docs.read,
        "beir": file_formats.read_beir,
        "msmarco": file_formats.read_msmarco,
        "columns": file_formats.read_columns,
        "texts": lambda texts: Source(documents=_text_rows(texts.path, texts.columns)),
    }
    return readers[config.name](config)


def read_texts(
    path: str | Path,
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    quarantine: Quarantine | None = None,
) -> Iterator[Row]:
    """Documents of a file, of a folder or of a named data set, one at a time.

    Args:
        path: see :func:`file_formats.text_rows`; or the name of a data set that needs no settings.
        columns: our names -> those of the file.
        quarantine: counts the rejected rows by reason: broken JSON, invalid UTF-8, no text, a repeated id. A
            summary is also logged once all rows are read.

    Returns:
        Rows with the strings doc_id, title and content; title or content may be empty, not both.

    Raises:
        DataError: at once if nothing is at `path`, or a file is of another type or its text cannot be told;
            after the last row if there was no text at all.
    """
    return _checked_texts(_text_rows(str(path), columns), str(path), quarantine or Quarantine())


def _text_rows(path: str, columns: Mapping[str, str]) -> Rows:
    if Path(path).exists() or path not in names():
        return file_formats.text_rows(path, columns)
    if columns:
        raise DataError(f"{path} is a data set whose columns are known: leave {[*columns.values()]} out")
    return read(_config_of(path)).documents


def _config_of(name: str) -> AnyDataset:
    try:
        return TypeAdapter[AnyDataset](AnyDataset).validate_python({"name": name})
    except ValidationError:
        raise DataError(f"the data set {name!r} needs settings: give the path of its files instead") from None


def _checked_texts(rows: Rows, path: str, quarantine: Quarantine) -> Iterator[Row]:
    count = 0
    for row in row_checks.documents(
        rows, config=DatasetConfig(), features=pa.schema([]), quarantine=quarantine
    ):
        count += 1
        yield {name: row[name] for name in ("doc_id", "title", "content")}
    reasons = {
        key.removeprefix("documents: "): n
        for key, n in quarantine.rejected.most_common()
        if key.startswith("documents: ")
    }
    summary = ", ".join(f"{reason} ({n:,})" for reason, n in reasons.items())
    if not count:
        raise DataError(f"{path} has no text: {summary or 'it has no rows'}")
    if reasons:
        log.warning("%s: %d texts, %d rows set aside: %s", path, count, sum(reasons.values()), summary)


# --- files -----------------------------------------------------------------------------------------------


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


def fetch_files(
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
    log.info("%s is at %s", name, base / name)
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
