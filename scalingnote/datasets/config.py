"""Settings of the prepare stage: a class per data source (`name`), and the click model."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from scalingnote.core.config import Config, Resources


class PositionClicks(Config):
    """A simulated engine and its users, by the position-based model (Craswell et al. 2008).

    A result is clicked if it is examined and attractive; P(examined) depends only on its position.
    """

    eta: float = Field(
        1.0,
        ge=0,
        description="position bias: rank r is examined with probability 1/r**eta (Joachims et al. 2017)",
    )
    ranker_skill: float = Field(
        1.0, ge=0, description="how far up the simulated engine puts relevant documents; 0 shuffles them"
    )
    users: int = Field(1000, ge=1, description="number of users, who share the sessions")
    seed: int = Field(0, ge=0, description="seed of all random draws")


class Passages(Config):
    """Division of long documents, at sentences, into passages that the model reads uncut."""

    max_tokens: int = Field(
        ge=16, description="of title and content of a passage: the model's limit without special tokens"
    )
    overlap: int = Field(
        0, ge=0, description="maximal tokens of the last sentences of a passage that the next one repeats"
    )
    tokenizer: str | None = Field(
        None, description="model that has the tokenizer: a folder, hub id or package:NAME; null: adopt.path"
    )

    @model_validator(mode="after")
    def _advances(self) -> "Passages":
        if 2 * self.overlap > self.max_tokens:
            raise ValueError(f"overlap is {self.overlap}: at most half of max_tokens, {self.max_tokens}")
        return self


class DatasetConfig(Config):
    """Settings that all sources share."""

    passages: Passages | None = Field(
        None, description="divides documents that are longer than the model reads; null: they are cut"
    )

    documents_per_part: int | None = Field(
        None,
        ge=1,
        description="rows of one documents/part-*.parquet, the unit of work of later stages; null: 4,096, "
        "above 67 million documents up to 65,536, fewer if the texts of a part would exceed 128 MiB",
    )


class SampledDataset(DatasetConfig):
    """Settings of sources that are sampled and split at random, with clicks that may be simulated."""

    seed: int = Field(0, ge=0, description="seed of the train/test split and of the subset")
    test_fraction: float = Field(0.1, ge=0, le=1, description="share of query groups held out for test")
    max_documents: int | None = Field(
        None, ge=1, description="number of documents to keep: whole groups in the order of a seeded hash"
    )
    click_model: PositionClicks | None = Field(
        PositionClicks(),
        description="simulates impressions if the source has none; null: no impressions",
    )


class PythonDocs(SampledDataset):
    """Documentation of installed Python packages; queries are first sentences of docstrings."""

    name: Literal["python_docs"] = "python_docs"
    packages: tuple[str, ...] = Field(
        (
            "stdlib",
            "torch",
            "numpy",
            "scipy",
            "pandas",
            "pyarrow",
            "sympy",
            "networkx",
            "matplotlib",
            "transformers",
            "ray",
            "fastapi",
            "pydantic",
        ),
        min_length=1,
        description="packages to walk; 'stdlib' is a fixed set of standard library modules",
    )


class Beir(SampledDataset):
    """A directory in the BEIR layout: corpus.jsonl, queries.jsonl, qrels/{train,dev,test}.tsv."""

    name: Literal["beir"] = "beir"
    path: str = Field(description="the directory")


class MsMarco(SampledDataset):
    """Files in the MS MARCO passage layout: collection.tsv, queries*.tsv, qrels*.tsv."""

    name: Literal["msmarco"] = "msmarco"
    collection: str = Field(description="doc_id <tab> content, or doc_id <tab> title <tab> content")
    train_queries: str | None = Field(None, description="query_id <tab> query")
    train_qrels: str | None = Field(None, description="query_id 0 doc_id relevance")
    test_queries: str | None = Field(None, description="query_id <tab> query")
    test_qrels: str | None = Field(None, description="query_id 0 doc_id relevance")

    @model_validator(mode="after")
    def _pairs(self) -> "MsMarco":
        for split in ("train", "test"):
            queries, qrels = getattr(self, f"{split}_queries"), getattr(self, f"{split}_qrels")
            if (queries is None) != (qrels is None):
                raise ValueError(f"{split}_queries and {split}_qrels come together: give both or neither")
        if self.train_queries is None and self.test_queries is None:
            raise ValueError("no queries: give train_queries and train_qrels, or the test ones")
        return self


class TableFile(Config):
    """One JSON-lines or Parquet file (or a glob of them) and the names of its columns."""

    path: str = Field(description="file, folder, or pattern of * and ?, local or a URI; .jsonl or .parquet")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="our column name -> the file's; a name left out is looked up as it is, id and text of "
        "documents also by the names in datasets/layouts.py",
    )


FeatureType = Literal["string", "int64", "float64", "bool"]


class Columns(SampledDataset):
    """Your own files: JSON lines or Parquet with a column mapping."""

    name: Literal["columns"] = "columns"
    documents: TableFile = Field(description="doc_id, title, topic, content, group")
    queries: TableFile = Field(description="query_id, query, optionally split")
    qrels: TableFile | None = Field(None, description="query_id, doc_id, relevance")
    impressions: TableFile | None = Field(
        None, description="session_id, user_id, query_id, doc_id, position, clicked, timestamp (seconds)"
    )
    scores: TableFile | None = Field(None, description="query_id, doc_id, score")
    users: TableFile | None = Field(None, description="user_id, and columns of their profiles")
    features: dict[str, FeatureType | Literal["vector"]] = Field(
        default_factory=dict, description="further document columns to keep, and their types"
    )
    profile: dict[str, FeatureType | Literal["vector"]] = Field(
        default_factory=dict, description="columns of users to keep, and their types"
    )

    @model_validator(mode="after")
    def _supervised(self) -> "Columns":
        if self.qrels is None and self.impressions is None:
            raise ValueError(
                "neither qrels nor impressions: give one, to state which document answers a query"
            )
        return self


class Texts(SampledDataset):
    """Documents without queries, for students that learn without them; evaluation has no judgements."""

    name: Literal["texts"] = "texts"
    path: str = Field(
        description="JSON lines, Parquet, fields between tabs, text lines, a folder or glob of such files"
    )
    columns: dict[Literal["doc_id", "title", "content"], str] = Field(
        default_factory=dict,
        description="our column name -> the files'; a name left out is looked up in datasets/layouts.py",
    )


class NewDocuments(DatasetConfig):
    """Your own new documents, without queries, for the index of a finished run."""

    name: Literal["new"] = "new"
    documents: TableFile = Field(description="doc_id, title, topic, content, group")
    features: dict[str, FeatureType] = Field(
        default_factory=dict, description="further document columns, as the run's own documents have them"
    )


def _utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


_Time = Annotated[datetime, AfterValidator(_utc)]
Window = tuple[_Time, _Time]


class Logs(DatasetConfig):
    """A search platform's documents and impression log, split by time; of any size, prepared on Ray."""

    name: Literal["logs"] = "logs"
    documents: TableFile = Field(
        description="doc_id, title, topic, content, optionally group; also of documents without "
        "impressions, which enlarge the searched pool"
    )
    impressions: TableFile = Field(
        description="session_id, query (its text), doc_id, position, clicked, timestamp; optionally user_id, "
        "query_id, dwell_s (seconds)"
    )
    scores: TableFile | None = Field(None, description="query (its text) or query_id, doc_id, score")
    qrels: TableFile | None = Field(
        None,
        description="query (its text) or query_id, doc_id, relevance, judged by people; null: documents "
        "clicked in the test window are relevant",
    )
    features: dict[str, FeatureType] = Field(
        default_factory=dict, description="further document columns to keep, and their types"
    )
    train: Window | None = Field(
        None,
        description="[start, end) of the impressions to learn from; ISO 8601, UTC if it has no zone",
    )
    test: Window | None = Field(None, description="[start, end) of the test queries, after the train window")
    test_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="without windows: share of the log's time span, at its end, that is for test",
    )
    timestamp_unit: Literal["s", "ms", "us"] = Field(
        "s", description="unit of timestamps that are plain numbers, counted from 1970"
    )
    min_clicks: int = Field(
        1, ge=1, description="clicks in the test window that make a document relevant to a test query"
    )
    min_dwell_s: float = Field(
        0.0,
        ge=0,
        description="minimum dwell time of such a click, in seconds; clicks without a time count too",
    )
    hold_out_documents: bool = Field(
        False,
        description="train on no document that a test query is judged on; the paper holds out only queries",
    )
    parts: int = Field(16, ge=1, description="buckets of every shuffle: a task holds the ids of one")
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _in_order(self) -> "Logs":
        if (self.train is None) != (self.test is None):
            raise ValueError("train and test windows come together: give both or neither")
        if self.train and self.test:
            for name, (start, end) in (("train", self.train), ("test", self.test)):
                if start >= end:
                    raise ValueError(f"the {name} window ends at {end}, before it starts: swap its two times")
            if self.test[0] < self.train[1]:
                raise ValueError(
                    f"the test window starts at {self.test[0]}, before train ends at {self.train[1]}: "
                    "a query must be new to the model when it is tested"
                )
        return self


AnyDataset = Annotated[
    PythonDocs | Beir | MsMarco | Columns | Texts | Logs,
    Field(discriminator="name"),
]


class VectorsConfig(Config):
    """Texts with their vectors, from a model that is not available."""

    path: str = Field(
        description="Parquet or JSON lines with columns of texts and vectors, or .npy with a row per text of "
        "`texts`; a folder or pattern of them"
    )
    texts: str | None = Field(None, description="file of texts in the order of the rows of .npy")
    queries: str | None = Field(
        None, description="file of queries with vectors, as `path`: learnt from as well, and measured with"
    )
    columns: dict[Literal["title", "content", "vector"], str] = Field(
        default_factory=dict,
        description="our column name -> the files'; left out, vectors are `vector`, `embedding`, or the only "
        "column of lists, and texts as in datasets/layouts.py",
    )
    validation_share: float = Field(
        0.05, ge=0, lt=1, description="share of the queries, or without any of the texts, held out to measure"
    )
