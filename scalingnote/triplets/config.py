"""Settings of the stages that make training data: planner, pseudo_queries, collect and mine."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scalingnote.core.config import Config, Resources
from scalingnote.models.config import BackboneConfig, Scratch

# --- planner ----------------------------------------------------------------------------------------------

TextField = Literal["title", "topic", "content"]


class Statistics(Config):
    """Settings of importance by the rarity of a word in a corpus: inverse document frequency, saturated."""

    kind: Literal["statistics"] = "statistics"
    corpus: Literal["documents", "queries"] = Field(
        "documents", description="texts that are counted: all documents, or the training queries"
    )
    fields: tuple[TextField, ...] = Field(
        ("title", "topic", "content"),
        min_length=1,
        description="fields of a document with the words that are counted",
    )
    resources: Resources = Field(Resources(), description="tasks that count")


class Learned(Config):
    """Settings of importance by a small encoder, trained on query words that positives repeat (DeepCT)."""

    kind: Literal["learned"] = "learned"
    backbone: BackboneConfig = Field(Scratch(architecture="bert"), description="any bidirectional encoder")
    max_length: int = Field(64, ge=4, description="tokens of a query that are read; later words have score 0")
    positives: tuple[Literal["clicks", "judgements"], ...] = Field(
        ("clicks", "judgements"), min_length=1, description="sources of a query's positive documents"
    )
    epochs: int = Field(3, ge=1, description="passes over the queries")
    peak_lr: float = Field(
        5e-4, gt=0, description="AdamW, linear warm-up and decay; 2e-5 for a pretrained encoder (DeepCT)"
    )
    seed: int = Field(0, ge=0, description="seed of weights, draws and the order of the queries")
    resources: Resources = Field(Resources(workers=1), description="the one task that trains")

    @model_validator(mode="after")
    def _reads_both_ways(self) -> "Learned":
        if isinstance(self.backbone, Scratch) and self.backbone.architecture != "bert":
            raise ValueError(
                f"backbone.architecture={self.backbone.architecture} reads only in one direction, but the "
                "importance of a word also depends on the words after it: set bert"
            )
        return self


PlannerConfig = Annotated[Statistics | Learned, Field(discriminator="kind")]


# --- pseudo_queries ---------------------------------------------------------------------------------------

TextKind = Literal[
    "title",
    "first_sentence",
    "sentence",
    "window",
    "title_window",
    "phrase",
    "keywords",
    "question",
]

# Shares of the kinds, from an ablation on three collections (docs/guides/distil.md): without questions or
# keywords a lookup table retains about a point less of its teacher's nDCG@10.
DEFAULT_MIX: dict[TextKind, float] = {
    "title": 0.05,
    "sentence": 0.15,
    "window": 0.25,
    "title_window": 0.06,
    "phrase": 0.09,
    "keywords": 0.1,
    "question": 0.3,
}


class PseudoQueriesConfig(Config):
    """Settings of the training texts of a student, drawn from the documents that it will search."""

    count: int | None = Field(
        40_000,
        ge=1,
        description="number of texts drawn from all documents, before equal ones are merged; null: one text "
        "of each kind in `mix` from every document",
    )
    mix: dict[TextKind, float] = Field(
        DEFAULT_MIX,
        min_length=1,
        description="kinds and their shares. title; first_sentence, sentence: of the content, cut at 32 "
        "words; window: consecutive words of title or content; title_window: part of the title and a window; "
        "phrase: words between function words; keywords: some content words in their order; question: "
        "phrases in a question template (English, Chinese). In scripts without spaces, two characters count "
        "as a word",
    )
    train_queries: int | None = Field(
        0, ge=0, description="real queries of the dataset's training split to add; null adds all of them"
    )
    query_log: str | None = Field(
        None,
        description="file with real queries to add: text lines, JSON lines or Parquet (column `query`, or "
        "`text`)",
    )
    validation_share: float = Field(
        0.02, ge=0, lt=1, description="share of the documents with texts for validation"
    )
    rows_per_part: int = Field(8192, ge=1, description="maximum rows of one part of the artifact")
    seed: int = Field(0, ge=0, description="seed of every draw")

    @field_validator("mix")
    @classmethod
    def _has_positive_shares(cls, mix: dict[TextKind, float]) -> dict[TextKind, float]:
        if wrong := [kind for kind, share in mix.items() if share <= 0]:
            raise ValueError(f"shares must be above 0: remove {', '.join(wrong)}")
        return mix


# --- collect ----------------------------------------------------------------------------------------------

# Maximum documents of a query that are read, of the shown ones (drawn evenly) and of the scored ones (the
# best): it bounds the memory of a query with a tenth of all clicks.
MAX_EVIDENCE = 10_000
NonNegative = Annotated[float, Field(ge=0)]


class SourceSampling(Config):
    """Sampling and weight of one source's triplets."""

    sample: float = Field(1.0, ge=0, le=1, description="share of the triplets that is kept, by a seeded hash")
    weight: float = Field(1.0, gt=0, description="weight of each row in the losses of stage I")


class Mixing(Config):
    """The four sources of ScalingNote, section 4.1: clicks or relevance, of the query or of an associate."""

    click_one: SourceSampling = SourceSampling()
    click_multi: SourceSampling = SourceSampling()
    relevance_one: SourceSampling = SourceSampling()
    relevance_multi: SourceSampling = SourceSampling()


class ScoreTable(Config):
    """Relevance scores of the dataset, in place of a ranking model."""

    kind: Literal["scores"] = "scores"


class BM25Ranker(Config):
    """BM25 over the training documents, with the defaults of `bm25`."""

    kind: Literal["bm25"] = "bm25"


class AssociationConfig(Config):
    """Settings of associated queries, which receive each other's triplets (ScalingNote, Algorithm 1)."""

    click_threshold: float = Field(
        0.5, ge=0, description="q1 receives q2's click triplets if q2 scores q1's top 2 terms above it"
    )
    relevance_threshold: float = Field(
        0.3,
        ge=0,
        description="q1 and q2 exchange relevance triplets if each scores the other's top 4 terms above it",
    )
    max_terms: int = Field(
        8,
        ge=4,
        le=16,
        description="maximum number of a query's terms above the threshold that are matched, best first",
    )
    max_associates: int = Field(
        32,
        ge=1,
        description="maximum associates that a query receives triplets from, per kind, strongest first",
    )


class CrossEncoderConfig(Config):
    """Settings of a cross-encoder that scores BM25's candidates."""

    kind: Literal["cross_encoder"] = "cross_encoder"
    path: str = Field(min_length=1, description="Hugging Face id or folder; a classifier with one label")
    candidates: int = Field(100, ge=1, description="documents per query that BM25 proposes")
    max_length: int = Field(512, ge=8, description="maximum tokens of query and document together")
    batch_size: int = Field(64, ge=1, description="pairs per forward pass")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the weights; bfloat16 is faster on GPUs, but its scores have steps of 0.4%"
    )
    activation: Literal["sigmoid", "none"] = Field(
        "sigmoid", description="activation of the logit; scores in 0..1 can be compared as ratios"
    )


class QueryGenerationConfig(Config):
    """Settings of generated queries near the observed ones (EmbedDistill, section 4.3 and appendix E)."""

    path: str = Field(
        "facebook/bart-base", min_length=1, description="Hugging Face id or folder of an encoder-decoder"
    )
    sigmas: tuple[NonNegative, ...] = Field(
        (0.1, 0.2), min_length=1, description="standard deviations of noise; one query is generated with each"
    )
    mask_fraction: float = Field(
        0.1, ge=0, lt=1, description="share of a query's tokens that is masked before encoding"
    )
    seed: int = Field(0, description="seed of noise and masks, together with the query's id and sigma")

    @model_validator(mode="after")
    def _distinct_sigmas(self) -> "QueryGenerationConfig":
        if len(set(self.sigmas)) < len(self.sigmas):
            raise ValueError(f"sigmas={self.sigmas} has a duplicate, which repeats a query: remove it")
        return self


AnyRanker = Annotated[ScoreTable | BM25Ranker | CrossEncoderConfig, Field(discriminator="kind")]


class CollectConfig(Config):
    """Settings of triplets from evidence (ScalingNote, section 4.1)."""

    sources: tuple[Literal["click", "relevance"], ...] = Field(
        ("click", "relevance"), min_length=1, description="'click' needs a dataset with impressions"
    )
    num_negatives: int = Field(
        1, ge=0, description="hard negatives per triplet; 1 in ScalingNote, none in EmbedDistill"
    )
    min_clicks: int = Field(1, ge=1, description="minimum satisfied clicks on a positive document of a query")
    min_dwell_s: float = Field(
        0.0,
        ge=0,
        description="minimum dwell time of a satisfied click; a click without a dwell time is satisfied, too",
    )
    ranker: AnyRanker | None = Field(
        None, description="ranking model of 'relevance'; null: the dataset's scores if it has any, else bm25"
    )
    top_k: int = Field(10, ge=1, description="K: ranks up to it are left out as likely false negatives")
    top_t: int = Field(50, ge=2, description="T: hard negatives are drawn from ranks K+1 to T")
    association: AssociationConfig | None = Field(
        AssociationConfig(), description="null: no multi-hop triplets"
    )
    mixing: Mixing = Mixing()
    decontamination: bool = Field(
        True, description="remove training queries that equal or nearly equal a test query; false: keep them"
    )
    query_generation: QueryGenerationConfig | None = Field(
        None, description="further queries for distillation (EmbedDistill, section 4.3)"
    )
    validation_fraction: float = Field(0.1, ge=0, lt=1, description="share of the queries; 9:1 in the paper")
    parts: int | None = Field(
        None,
        ge=1,
        description="files of the artifact; a query's hash selects its file; null: one per 131,072 rows of "
        "queries and evidence, at most 8; more for large logs in any case",
    )
    seed: int = Field(0, description="seed of the draws and of the validation split")
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _ranks_in_order(self) -> "CollectConfig":
        if self.top_t < self.top_k + self.num_negatives:
            raise ValueError(
                f"top_t={self.top_t} leaves fewer than num_negatives={self.num_negatives} ranks above "
                f"top_k={self.top_k}: increase top_t"
            )
        if self.top_t > MAX_EVIDENCE:
            raise ValueError(
                f"top_t={self.top_t} is above {MAX_EVIDENCE:,}, the documents that are read for a query: "
                "lower it"
            )
        if isinstance(self.ranker, CrossEncoderConfig) and self.ranker.candidates < self.top_t:
            raise ValueError(
                f"ranker.candidates={self.ranker.candidates} is below top_t={self.top_t}: increase it"
            )
        return self


# --- mine -------------------------------------------------------------------------------------------------


class MineConfig(Config):
    """Settings of hard negatives from the last dual encoder or from run files (ANCE, Xiong et al. 2021)."""

    runs: tuple[str, ...] = Field(
        (),
        description="TREC run files over the training queries (dense, BM25, hybrid); "
        "none: search with the last round's dual encoder. Their paths identify a finished stage",
    )
    runs_sha256: tuple[str, ...] = Field(
        (),
        description="checksums of the files in `runs`: other contents are refused. If empty, they are set "
        "when the stage starts, so that work on files with other contents is not resumed",
    )
    search: Literal["exact", "index"] = Field(
        "exact",
        description="exact: compare every query with every document; index: with those in the nearest lists "
        "of an inverted index of each shard, several times as fast for many queries, but misses about 1 %",
    )
    nprobe: int = Field(
        32, ge=1, description="lists of a shard's index that are searched; an index has √documents lists"
    )
    first_rank: int = Field(11, ge=1, description="ranks before it are left out as likely false negatives")
    last_rank: int = Field(100, ge=1, description="negatives are drawn from ranks first_rank to last_rank")
    num_negatives: int = Field(1, ge=1, description="hard negatives per triplet")
    max_score_ratio: float | None = Field(
        0.95, gt=0, description="maximum score of a negative, as a multiple of the positive's; null: none"
    )
    max_documents: int | None = Field(
        None,
        ge=1,
        description="approximate number of training documents to search, by a seeded hash; null: all. "
        "Positives are scored in any case",
    )
    token_budget: int = Field(8192, ge=64, description="padded tokens per forward pass")
    seed: int = Field(0, description="seed of the draws")
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _window_holds_enough(self) -> "MineConfig":
        if self.last_rank < self.first_rank + self.num_negatives - 1:
            raise ValueError(
                f"ranks {self.first_rank} to {self.last_rank} hold fewer than num_negatives="
                f"{self.num_negatives}: increase last_rank"
            )
        return self
