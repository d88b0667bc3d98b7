"""Settings of towers: backbone, adapters, prompt, pooling, lengths and storage; and of the stage adopt."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from scalingnote.core.config import Config

PAPER_PROMPT = (
    "Document: {{'title': {title}}}. Predict a query term: \"[TITLE_QUERY]\".\n"
    "Document: {{'topic': {topic}, 'content': {content}}}. "
    'Predict a query term: "[CONTENT_QUERY]", combine the predicted query terms, '
    'and compress the above content into one word: "[EMB]".'
)


class Reading(Config):
    """How a backbone's tokenizer reads every text; saved towers keep it."""

    bos: Literal["auto", "always", "never"] = Field(
        "auto",
        description="of decoders, whether every text begins with a token: as the tokenizer does it; always, "
        "with the end token where there is no other (LightRetriever, Eq. 10); or never",
    )
    lowercase: bool = Field(False, description="lower-case every text, of queries and documents alike")


class Pretrained(Reading):
    """Any Hugging Face model, decoder or bidirectional encoder, by hub id or folder."""

    kind: Literal["pretrained"] = "pretrained"
    path: str = Field(description="hub id or folder, e.g. Qwen/Qwen2.5-7B-Instruct")
    layers: int | None = Field(None, ge=1, description="keep only the first layers; None keeps all")


class Scratch(Reading):
    """A small model of a known architecture with random weights and a tokenizer trained on the corpus."""

    kind: Literal["scratch"] = "scratch"
    architecture: Literal["qwen2", "bert"] = Field("qwen2", description="causal or bidirectional")
    layers: int = Field(2, ge=1, description="transformer layers")
    hidden: int = Field(128, ge=8, description="hidden size; a multiple of heads")
    heads: int = Field(4, ge=1, description="attention heads")
    intermediate: int = Field(256, ge=8, description="width of the feed-forward part")
    vocabulary: int = Field(8192, ge=300, description="byte-level BPE tokens learnt from the corpus")
    max_positions: int = Field(512, ge=8, description="longest input in tokens")


BackboneConfig = Annotated[Pretrained | Scratch, Field(discriminator="kind")]


Stored = Literal["full", "int8", "nf4"]  # formats of frozen weights


class Lora(Config):
    """Low-rank adapters on all linear layers of a frozen backbone, through peft."""

    rank: int = Field(16, ge=1, description="of each adapter's two matrices")
    alpha: float = Field(32.0, gt=0, description="updates are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of an adapter's input, in training")
    dora: bool = Field(False, description="weight-decomposed: magnitude and direction apart")
    base: Stored = Field(
        "full",
        description="how the frozen linear layers are stored: full, in the format of products; int8, or nf4 "
        "(QLoRA, needs bitsandbytes): a half and a quarter of bfloat16's bytes, for a slower step",
    )

    @model_validator(mode="after")
    def _fits(self) -> "Lora":
        if self.dora and self.base != "full":
            raise ValueError(f"dora reads whole weights, and base={self.base} stores none: choose base=full")
        return self


Start = Literal["auto", "none", "random"]  # of a projection
Pooling = Literal["auto", "cls", "last", "mean"]


class TowerConfig(Config):
    """One tower: text -> tokens -> hidden states -> pooled state -> projected embedding."""

    kind: Literal["transformer"] = "transformer"
    backbone: BackboneConfig = Scratch()
    lora: Lora | None = Field(None, description="None trains all weights")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="auto: the fastest that this machine has"
    )
    max_length: int = Field(64, ge=4, description="tokens fed; content is cut first, then topic")
    prompt: str = Field(
        PAPER_PROMPT,
        description="document towers only: {title} {topic} {content} and the placeholders "
        "[TITLE_QUERY] [CONTENT_QUERY] [EMB], one per view (ScalingNote, section 3.2)",
    )
    pooling: Literal["placeholders"] | Pooling = Field(
        "placeholders",
        description="placeholders: the states that `prompt` marks, and a query's first or last state. All "
        "others read a published embedding model as it is, without `prompt`; auto: as its files say, or, "
        "where they are silent, the last token of a decoder and the mean, or [CLS], of an encoder",
    )
    reads: Literal["text", "tokens"] = Field(
        "text",
        description="tokens: of documents, each token alone, and the mean of their states, without `prompt`: "
        "LightRetriever's lightweight documents (section 4.1), to compare with; queries have kind=token_wise",
    )
    projection: Start = Field(
        "auto",
        description="auto: the published model's dense layers; with pooling=placeholders a matrix to train, "
        "which starts as the identity where a pretrained backbone is `dim` wide, else random; none: pooled "
        "states are embeddings; random: a new matrix of `dim` rows, to train",
    )
    normalise: bool | None = Field(
        None, description="of a published model: embeddings of length 1; null: as its files say"
    )
    prefix: str | None = Field(
        None, description="of a published model: text before every text of this tower; null: its own prompt"
    )

    @model_validator(mode="after")
    def _fits_its_pooling(self) -> "TowerConfig":
        own, source = self.pooling == "placeholders", self.backbone
        if self.reads == "tokens" and (not own or self.attention == "flash_attention_2"):
            raise ValueError(
                "reads=tokens pools the end of each token, with a mask of blocks: leave pooling at "
                "placeholders and attention at auto"
            )
        if not own and (source.lowercase or source.bos != "auto"):
            raise ValueError(
                f"pooling={self.pooling} reads a published model as it is: leave lowercase and bos of its "
                "backbone out, or set pooling=placeholders"
            )
        changed = [name for name in ("normalise", "prefix") if getattr(self, name) is not None]
        if own and changed:
            raise ValueError(
                f"{', '.join(changed)} need a published model: set pooling to auto, cls, mean..."
            )
        return self


class LookupConfig(Config):
    """A query tower without a model: the mean of its tokens' rows in one table."""

    kind: Literal["lookup"] = "lookup"
    max_length: int = Field(64, ge=2, description="tokens read")
    vocabulary: int = Field(
        8192, ge=300, description="tokens learnt from the queries, where none are inherited"
    )
    weighting: Literal["mean", "learned"] = Field(
        "mean",
        description="learned: a weight per token in the mean; a student's start at a / (a + share of the "
        "token among all of its texts), a = 0.0003 (Arora et al. 2017, SIF)",
    )
    bigrams: int = Field(
        0, ge=0, description="pairs of neighbouring tokens with rows of their own, the most frequent ones"
    )
    ends: bool = Field(
        False, description="rows of their own for the first, second, last but one and last token of a query"
    )
    attention: bool = Field(
        False, description="one head over the looked-up rows: which tokens stand together matters"
    )
    centring: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="of a student: while it learns, every text has one more row, which takes what all texts "
        "have in common; at the end this share of their mean embedding is subtracted from every row (SIF "
        "subtracts a common component, too); 0: neither",
    )
    storage: Literal["float32", "float16", "int8"] = Field("float16", description="of the saved table")

    @model_validator(mode="after")
    def _can_be_centred(self) -> "LookupConfig":
        if self.attention and self.centring:
            raise ValueError("a table with attention cannot be centred: set centring to 0")
        return self


TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # also of a folder


class TokenWiseConfig(Config):
    """LightRetriever's dense query side: each token read alone behind an instruction, then the mean.

    Trained through the whole backbone; saved as the table of all tokens' embeddings, a lookup tower.
    """

    kind: Literal["token_wise"] = "token_wise"
    backbone: BackboneConfig | None = Field(
        None, description="None: the document tower's own, the weights that learn and the adapter too"
    )
    lora: Lora | None = Field(None, description="of a backbone of its own; None trains all weights")
    max_length: int = Field(64, ge=2, description="tokens of the query")
    projection: Start = Field(
        "auto", description="as of a transformer tower; without a backbone of its own, the document tower's"
    )
    reads: Literal["states", "embeddings"] = Field(
        "states",
        description="embeddings: a token's vector is its row of the backbone's input table, and no layer is "
        "read; to compare with (LightRetriever, Table 4)",
    )
    instruction: str = Field(
        "Retrieve documents that answer the query: ", description="read once, before every token"
    )
    instructions: dict[TaskName, tuple[str, ...]] = Field(
        {},
        description="of the sets of a mixture: each batch is read behind one of its set's, drawn at random, "
        "in place of `instruction`; the first of each gives a table of its own, tasks/SET",
    )
    tasks: dict[TaskName, str] = Field(
        {},
        description="instructions of further tasks by name: each gets a table of its own beside the first, "
        "tasks/NAME, as LightRetriever has one per test set (appendix A.4); one that training never read "
        "is told",
    )
    storage: Literal["float32", "float16", "int8"] = Field("float16", description="of the saved table")

    @property
    def trained_instructions(self) -> tuple[str, ...]:
        """All that queries are read behind in training; `instruction` first, then those of each set."""
        return (self.instruction, *(text for texts in self.instructions.values() for text in texts))

    def instructions_of(self, name: str) -> tuple[int, ...]:
        """Numbers of a set's own in `trained_instructions`; that of `instruction` where it has none."""
        first = 1
        for other, texts in self.instructions.items():
            if other == name and texts:
                return tuple(range(first, first + len(texts)))
            first += len(texts)
        return (0,)

    @property
    def all_tasks(self) -> dict[str, str]:
        """Instructions that get a table: the first of each set of a mixture, and `tasks`."""
        return {name: texts[0] for name, texts in self.instructions.items() if texts} | self.tasks


class AdoptConfig(Config):
    """A published embedding model instead of training by stage I."""

    path: str = Field(
        description="hub id, folder or package:NAME, as BAAI/bge-small-en-v1.5; of a pair, that of documents"
    )
    weights_sha256: str | None = Field(
        None, description="of model.safetensors at `path`; other weights are refused. null: any"
    )
    query_path: str | None = Field(
        None, description="of a pair of models, that of queries; null: one model encodes both"
    )
    pooling: Pooling = Field(
        "auto",
        description="auto: from the model's files; of a plain transformer, which has none, the last token of "
        "a decoder and the mean, or [CLS], of an encoder",
    )
    normalise: bool | None = Field(None, description="embeddings of length 1; null: from the model's files")
    similarity: Literal["cosine", "dot"] | None = Field(
        None,
        description="of a query and a document in search: cosine, or dot, the inner product of documents of "
        "their own length; null: the model's own (similarity_fn_name), which must be one that ranks as these",
    )
    query_prefix: str | None = Field(
        None, description="text before every query; null: the model's own prompt"
    )
    document_prefix: str | None = Field(None, description="text before every document; null: the model's own")
    query_max_length: int | None = Field(
        None, ge=2, description="maximum tokens of a query; null: the model's maximum"
    )
    document_max_length: int | None = Field(
        None, ge=2, description="maximum tokens of a document; null: as above"
    )


def _kind(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind or "transformer"


StudentConfig = Annotated[
    Annotated[TowerConfig, Tag("transformer")] | Annotated[LookupConfig, Tag("lookup")],
    Discriminator(_kind),
]
QueryTowerConfig = Annotated[
    Annotated[TowerConfig, Tag("transformer")]
    | Annotated[LookupConfig, Tag("lookup")]
    | Annotated[TokenWiseConfig, Tag("token_wise")],
    Discriminator(_kind),
]
