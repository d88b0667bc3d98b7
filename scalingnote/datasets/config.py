"""Settings of the prepare stage: a class per data source (`name`) and per click model (`kind`)."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from scalingnote.config import Config, Resources


class Taste(Config):
    """Tastes of simulated users, who prefer some values and ranges of features and click others less."""

    columns: tuple[str, ...] = Field(
        min_length=1, description="features of documents: of texts some values are liked, of numbers a range"
    )
    values: int = Field(5, ge=1, description="of a text that a user likes, drawn by how frequent they are")
    band: float = Field(0.4, gt=0, le=1, description="share of the documents within the range a user likes")
    strength: float = Field(
        0.8,
        ge=0,
        le=1,
        description="share of its attraction that a document loses with each column not liked",
    )
    told: float = Field(
        0.7, ge=0, le=1, description="probability that a profile states a preference of its user"
    )


class ClickModelConfig(Config):
    """Settings of the simulated engine and its users that all click models share.

    A result is clicked if it is examined and attractive; the models differ in what is examined.
    """

    sessions_per_query: int = Field(3, ge=1, description="how often each training query is issued")
    results_per_session: int = Field(10, ge=1, description="length of the exposed list")
    relevant_per_session: int = Field(
        3, ge=1, description="maximum number of relevant documents in a session"
    )
    same_topic_share: float = Field(
        0.7, ge=0, le=1, description="share of the non-relevant exposures drawn from the relevant one's topic"
    )
    attractiveness: float = Field(
        0.9, gt=0, le=1, description="P(click | examined) of the highest grade; lower grades in proportion"
    )
    noise: float = Field(0.05, ge=0, le=1, description="P(click | examined) of a non-relevant document")
    satisfaction: float = Field(
        0.8, ge=0, le=1, description="P(satisfied | clicked) of the highest grade; lower grades in proportion"
    )
    satisfaction_noise: float = Field(
        0.05, ge=0, le=1, description="P(satisfied | clicked) of a non-relevant document"
    )
    # So 81 % of the satisfied clicks and 8 % of the others last the customary 30 s (Fox et al. 2005).
    satisfied_dwell_s: float = Field(
        60.0, gt=0, description="median seconds spent on a document that satisfies"
    )
    unsatisfied_dwell_s: float = Field(10.0, gt=0, description="median seconds spent on one that does not")
    dwell_sigma: float = Field(
        0.8, ge=0, description="spread of dwell times: standard deviation of their natural logarithm"
    )
    ranker_skill: float = Field(
        1.0, ge=0, description="how far up the simulated engine puts relevant documents; 0 shuffles them"
    )
    users: int = Field(1000, ge=1, description="number of users, who share the sessions")
    taste: Taste | None = Field(None, description="null: all users find the same attractive")
    start: str = Field(
        "2024-01-01T00:00:00",
        pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}$",
        description="UTC time of the first session",
    )
    seconds_between_sessions: int = Field(30, ge=1, description="time from one session to the next")
    seed: int = Field(0, ge=0, description="seed of all random draws")

    @model_validator(mode="after")
    def _satisfaction_lasts(self) -> "ClickModelConfig":
        if self.satisfied_dwell_s < self.unsatisfied_dwell_s:
            raise ValueError(
                f"satisfied_dwell_s={self.satisfied_dwell_s:g} is below "
                f"unsatisfied_dwell_s={self.unsatisfied_dwell_s:g}: a satisfied user stays longer; swap them"
            )
        return self


class PositionClicks(ClickModelConfig):
    """Position-based model: P(examined) of a place depends only on its position (Craswell et al. 2008)."""

    kind: Literal["position"] = "position"
    eta: float = Field(
        1.0,
        ge=0,
        description="position bias: rank r is examined with probability 1/r**eta (Joachims et al. 2017)",
    )


class CascadeClicks(ClickModelConfig):
    """Cascade: read from the top, click the first attractive result, stop there (Craswell et al. 2008)."""

    kind: Literal["cascade"] = "cascade"


class DynamicBayesianClicks(ClickModelConfig):
    """Dynamic Bayesian network: read from the top until satisfied or tired (Chapelle and Zhang 2009)."""

    kind: Literal["dbn"] = "dbn"
    perseverance: float = Field(
        0.9, ge=0, le=1, description="gamma: P(next place examined | this one examined, not satisfied by it)"
    )


def _default_to_position(values: Any) -> Any:
    # A config may set one field of the default model without naming the model.
    return {"kind": "position", **values} if isinstance(values, dict) else values


AnyClickModel = Annotated[
    PositionClicks | CascadeClicks | DynamicBayesianClicks,
    Field(discriminator="kind"),
    BeforeValidator(_default_to_position),
]


class DatasetConfig(Config):
    """Settings that all sources share."""

    seed: int = Field(0, ge=0, description="seed of the train/test split and of the subsets")
    test_fraction: float = Field(0.1, ge=0, le=1, description="share of query groups held out for test")
    max_documents: int | None = Field(
        None, ge=1, description="number of documents to keep: whole groups in the order of a seeded hash"
    )
    max_queries: int | None = Field(
        None, ge=1, description="number of queries to keep, in the order of a seeded hash"
    )
    max_title_chars: int = Field(512, ge=1, description="a document with a longer title is set aside")
    max_content_chars: int = Field(20_000, ge=1, description="longer content is cut, and counted")
    documents_per_part: int | None = Field(
        None,
        ge=1,
        description="rows of one documents/part-*.parquet, the unit of work of later stages; null: 4,096, "
        "above 67 million documents up to 65,536, fewer where texts of a part would exceed 128 MiB",
    )
    click_model: AnyClickModel | None = Field(
        PositionClicks(),
        description="simulates impressions where the source has none; null: no impressions",
    )


class PythonDocs(DatasetConfig):
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
        description="packages to walk; 'stdlib' is a stated set of standard library modules",
    )
    module_depth: int = Field(
        3,
        ge=1,
        description="maximum number of name components of an imported module (3: torch.nn.functional)",
    )
    omit_name_words: bool = Field(
        False, description="leave the words of the object's own name out of its query: no lexical shortcut"
    )
    timeout_s: float = Field(300.0, gt=0, description="a package that takes longer is lost, and reported")
    min_query_words: int = Field(4, ge=1, description="a shorter first sentence makes no query")
    max_query_documents: int = Field(
        5, ge=1, description="a first sentence shared by more documents makes no query"
    )


class MedQuad(DatasetConfig):
    """16,407 English medical questions and answers; groups are medical foci."""

    name: Literal["medquad"] = "medquad"


class StackExchangeDevOps(DatasetConfig):
    """Questions and answers of devops.stackexchange.com, graded by acceptance and votes."""

    name: Literal["stackexchange_devops"] = "stackexchange_devops"


class ChorusIcecat(DatasetConfig):
    """19,406 products of an electronics shop, 135 queries judged 0-3."""

    name: Literal["chorus_icecat"] = "chorus_icecat"
    # A tenth of 135 queries would measure nothing.
    test_fraction: float = Field(0.5, ge=0, le=1, description="share of query groups held out for test")


class ZhReadingTitles(DatasetConfig):
    """Titled Chinese paragraphs with human questions (DRCD, CMRC 2018, XQuAD-zh); groups are articles."""

    name: Literal["zh_reading_titles"] = "zh_reading_titles"


class ZhMedicalQA(DatasetConfig):
    """7,644 Chinese medical questions with a department and an answer."""

    name: Literal["zh_medical_qa"] = "zh_medical_qa"


class DuReaderDemoZh(DatasetConfig):
    """Chinese web queries with the engine's ranks and the pages an annotator selected."""

    name: Literal["dureader_demo_zh"] = "dureader_demo_zh"
    test_fraction: float = Field(0.2, ge=0, le=1, description="share of query groups held out for test")


class Beir(DatasetConfig):
    """A directory in the BEIR layout: corpus.jsonl, queries.jsonl, qrels/{train,dev,test}.tsv."""

    name: Literal["beir"] = "beir"
    path: str = Field(description="the directory")


class MsMarco(DatasetConfig):
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
    """One JSON-lines or Parquet file (or a glob of them) and where its columns are found."""

    path: str = Field(description="file, folder, or pattern of * and ?, local or a URI; .jsonl or .parquet")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="our column name -> the file's; a name left out is looked up as it is, id and text of "
        "documents also by the names in datasets/layouts.py",
    )


FeatureType = Literal["string", "int64", "float64", "bool"]


class Columns(DatasetConfig):
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
            raise ValueError("neither qrels nor impressions: nothing says which document answers a query")
        return self


class Texts(DatasetConfig):
    """Documents without queries, for students that learn without them; nothing is judged for evaluation."""

    name: Literal["texts"] = "texts"
    path: str = Field(
        description="JSON lines, Parquet, fields between tabs, text lines, a folder or glob of such files"
    )
    columns: dict[Literal["doc_id", "title", "content"], str] = Field(
        default_factory=dict,
        description="our column name -> the files'; a name left out is looked up in datasets/layouts.py",
    )
    click_model: None = None


class NewDocuments(DatasetConfig):
    """New documents of your own, without queries, for the index of a finished run."""

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
    documents: TableFile = Field(description="doc_id, title, topic, content, optionally group")
    unpaired: TableFile | None = Field(
        None, description="documents without impressions that enlarge the searched pool"
    )
    impressions: TableFile = Field(
        description="session_id, query (its text), doc_id, position, clicked, timestamp; optionally user_id, "
        "query_id, dwell_s (seconds)"
    )
    scores: TableFile | None = Field(None, description="query (its text) or query_id, doc_id, score")
    qrels: TableFile | None = Field(
        None,
        description="query (its text) or query_id, doc_id, relevance, judged by people; null: what was "
        "clicked in the test window is relevant",
    )
    features: dict[str, FeatureType] = Field(
        default_factory=dict, description="further document columns to keep, and their types"
    )
    train: Window | None = Field(
        None,
        description="[start, end) of the impressions to learn from; ISO 8601, UTC where it names no zone",
    )
    test: Window | None = Field(None, description="[start, end) of the test queries, after the train window")
    test_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="without windows: so much of the log's time span, at its end, is for test",
    )
    timestamp_unit: Literal["s", "ms", "us"] = Field(
        "s", description="unit of timestamps that are plain numbers, counted from 1970"
    )
    fold_case: bool = Field(
        True, description="queries that differ in case only are one query, shown in its most frequent form"
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
        description="train on no document that a test query is judged on; the paper holds out queries only",
    )
    parts: int = Field(16, ge=1, description="buckets of every shuffle: a task holds the ids of one")
    slice_mb: int = Field(64, ge=1, description="MiB of input, uncompressed, that a task reads at once")
    resources: Resources = Resources()
    # A log is neither sampled nor simulated, so these settings of other sources are refused.
    seed: Literal[0] = Field(0, description="nothing is drawn: windows of time decide")
    max_documents: None = Field(None, description="a log is taken whole")
    max_queries: None = Field(None, description="a log is taken whole: narrow the windows instead")
    click_model: None = Field(None, description="the clicks are real")

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
    PythonDocs
    | MedQuad
    | StackExchangeDevOps
    | ChorusIcecat
    | ZhReadingTitles
    | ZhMedicalQA
    | DuReaderDemoZh
    | Beir
    | MsMarco
    | Columns
    | Texts
    | Logs,
    Field(discriminator="name"),
]
