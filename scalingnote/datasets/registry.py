"""Which data sets there are: a name leads to its reader, which is imported when it is asked for."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from scalingnote.datasets.config import AnyDataset
from scalingnote.datasets.download import fetch as download
from scalingnote.datasets.download import locate
from scalingnote.datasets.rows import Source
from scalingnote.errors import ConfigError


@dataclass(frozen=True)
class Description:
    """What a data set is; `languages` and `licence` are "any" and "yours" for the generic readers."""

    name: str
    summary: str
    languages: str
    licence: str
    downloaded: bool  # whether it has files of its own to fetch


_DESCRIPTIONS = {
    entry.name: entry
    for entry in (
        Description(
            "python_docs",
            "documentation of the installed Python packages; queries are docstrings' first sentences",
            "en",
            "each package's own",
            downloaded=False,
        ),
        Description(
            "medquad",
            "16,407 medical question-answer pairs from 9 NIH collections",
            "en",
            "CC BY 4.0",
            downloaded=True,
        ),
        Description(
            "stackexchange_devops",
            "3,700 questions and 4,968 answers of devops.stackexchange.com, graded by acceptance and votes",
            "en",
            "CC BY-SA 4.0",
            downloaded=True,
        ),
        Description(
            "chorus_icecat",
            "19,406 products of an electronics shop, 135 queries judged 0-3",
            "en",
            "Apache-2.0; product data Icecat Open Content License",
            downloaded=True,
        ),
        Description(
            "zh_reading_titles",
            "titled paragraphs with human questions: DRCD, CMRC 2018, XQuAD-zh",
            "zh",
            "CC BY-SA 3.0 and 4.0",
            downloaded=True,
        ),
        Description(
            "zh_medical_qa",
            "7,644 medical questions with department and answer",
            "zh",
            "MIT",
            downloaded=True,
        ),
        Description(
            "dureader_demo_zh",
            "200 labelled web queries and 1,393 result pages with engine ranks and an annotator's selection",
            "zh",
            "Apache-2.0",
            downloaded=True,
        ),
        Description("beir", "a directory in the BEIR layout", "any", "yours", downloaded=False),
        Description("msmarco", "files in the MS MARCO passage layout", "any", "yours", downloaded=False),
        Description(
            "columns", "JSON-lines or Parquet files with a column mapping", "any", "yours", downloaded=False
        ),
        Description(
            "texts",
            "documents alone, without queries: JSON lines, Parquet, text lines, a BEIR folder",
            "any",
            "yours",
            downloaded=False,
        ),
        Description(
            "logs",
            "a platform's documents and impression log, of any size, split by time",
            "any",
            "yours",
            downloaded=False,
        ),
    )
}


def names() -> list[str]:
    """Every data set, in the order they are best tried."""
    return list(_DESCRIPTIONS)


def describe(name: str) -> Description:
    """What `name` is; ConfigError for an unknown one."""
    if name not in _DESCRIPTIONS:
        raise ConfigError(f"no data set {name!r}: choose one of {', '.join(names())}")
    return _DESCRIPTIONS[name]


def available(name: str) -> bool:
    """Whether `name` can be read without a download."""
    return not describe(name).downloaded or locate(name, _reader(name).FILES) is not None


def fetch(name: str) -> Path:
    """The directory of a downloaded data set, fetched first if need be."""
    if not describe(name).downloaded:
        raise ConfigError(
            f"{name} has nothing to fetch: its files are named in the config, or it is built in"
        )
    reader = _reader(name)
    return download(name, files=reader.FILES, remotes=reader.REMOTES, convert=reader.convert)


def read(config: AnyDataset) -> Source:
    """Raw rows of the data set a config names."""
    directory = fetch(config.name) if describe(config.name).downloaded else None
    source: Source = _reader(config.name).read(config, directory)
    return source


def _reader(name: str) -> ModuleType:
    describe(name)
    return importlib.import_module(f"scalingnote.datasets.{name}")
