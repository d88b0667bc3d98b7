"""Settings of towers (backbone, adapters, prompt, pooling, lengths and storage) and of the stage adopt."""

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
    """How a backbone's tokenizer reads every text; saved towers keep these settings."""

    bos: Literal["auto", "always", "never"] = Field(
        "auto",
        description="for decoders, whether every text begins with a token. auto: as the tokenizer does; "
        "always: with the end token if the tokenizer has no other (LightRetriever, Eq. 10); never",
    )
    lowercase: bool = Field(False, description="lower-case every text, both queries and documents")


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

    rank: int = Field(16, ge=1, description="rank of each adapter's two matrices")
    alpha: float = Field(32.0, gt=0, description="updates are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of an adapter's input, in training")
    dora: bool = Field(False, description="weight-decomposed: magnitude and direction are trained separately")
    base: Stored = Field(
        "full",
        description="how the frozen linear layers are stored. full: in the format of products; int8: half of "
        "bfloat16's bytes; nf4 (QLoRA, needs bitsandbytes): a quarter. int8 and nf4 make a step slower",
    )

    @model_validator(mode="after")
    def _fits(self) -> "Lora":
        if self.dora and self.base != "full":
            raise ValueError(f"dora needs unpacked weights, base={self.base} packs them: choose base=full")
        return self


Start = Literal["auto", "none", "random"]  # of a projection
Pooling = Literal["auto", "cls", "last", "mean"]


class TowerConfig(Config):
    """One tower: text -> tokens -> hidden states -> pooled state -> projected embedding."""

    kind: Literal["transformer"] = "transformer"
    backbone: BackboneConfig = Scratch()
    lora: Lora | None = Field(None, description="None trains all weights")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="auto: the fastest one of this machine"
    )
    max_length: int = Field(64, ge=4, description="maximum tokens of a row; content is cut first, then topic")
    prompt: str = Field(
        PAPER_PROMPT,
        description="document towers only: {title} {topic} {content} and the placeholders "
        "[TITLE_QUERY] [CONTENT_QUERY] [EMB], one per view (ScalingNote, section 3.2)",
    )
    pooling: Literal["placeholders"] | Pooling = Field(
        "placeholders",
        description="placeholders: the states that `prompt` marks, and a query's first or last state. All "
        "others read a published embedding model as it is, without `prompt`. auto: as its files state; if "
        "they do not, the last token of a decoder and the mean, or [CLS], of an encoder",
    )
    reads: Literal["text", "tokens"] = Field(
        "text",
        description="tokens: for documents, each token is read by itself, without `prompt`, and their states "
        "are averaged: LightRetriever's lightweight documents (section 4.1), a baseline; for queries, set "
        "kind=token_wise",
    )
    projection: Start = Field(
        "auto",
        description="auto: the published model's dense layers; with pooling=placeholders a matrix to train, "
        "which starts as the identity if a pretrained backbone is `dim` wide, else random. none: pooled "
        "states are embeddings. random: a new matrix of `dim` rows, to train",
    )
    normalise: bool | None = Field(
        None, description="for a published model: embeddings of length 1; null: as its files state"
    )
    prefix: str | None = Field(
        None, description="for a published model: prefix of every text of this tower; null: its own prompt"
    )

    @model_validator(mode="after")
    def _fits_its_pooling(self) -> "TowerConfig":
        has_placeholders, source = self.pooling == "placeholders", self.backbone
        if self.reads == "tokens" and (not has_placeholders or self.attention == "flash_attention_2"):
            raise ValueError(
                "reads=tokens pools the state after each token, with a mask of blocks: leave pooling at "
                "placeholders and attention at auto"
            )
        if not has_placeholders and (source.lowercase or source.bos != "auto"):
            raise ValueError(
                f"pooling={self.pooling} reads a published model as it is: leave lowercase and bos of its "
                "backbone out, or set pooling=placeholders"
            )
        model_settings = [name for name in ("normalise", "prefix") if getattr(self, name) is not None]
        if has_placeholders and model_settings:
            raise ValueError(
                f"{', '.join(model_settings)} need a published model: set pooling to auto, cls, mean..."
            )
        return self


class LookupConfig(Config):
    """A query tower without a model: the mean of the rows of a query's tokens in one table."""

    kind: Literal["lookup"] = "lookup"
    max_length: int = Field(64, ge=2, description="maximum tokens of a query")
    vocabulary: int = Field(8192, ge=300, description="tokens learnt from the queries, if none are inherited")
    weighting: Literal["mean", "learned"] = Field(
        "mean",
        description="learned: a weight per token in the mean. A student's weights start at a / (a + share "
        "of the token among all tokens of its texts), a = 0.0003 (Arora et al. 2017, SIF)",
    )
    bigrams: int = Field(
        0, ge=0, description="number of pairs of neighbouring tokens with their own rows, most frequent first"
    )
    ends: bool = Field(
        False, description="separate rows for the first, second, last but one and last token of a query"
    )
    attention: bool = Field(
        False,
        description="one head over the looked-up rows: the result depends on which tokens occur together",
    )
    centring: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="for a student: in training every text has one more row, for the component that all "
        "texts have in common; at the end this share of their mean embedding is subtracted from every row "
        "(SIF subtracts a common component, too). 0: neither",
    )
    storage: Literal["float32", "float16", "int8"] = Field(
        "float16", description="number format of the saved table"
    )

    @model_validator(mode="after")
    def _can_be_centred(self) -> "LookupConfig":
        if self.attention and self.centring:
            raise ValueError("a table with attention cannot be centred: set centring to 0")
        return self


TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # also the name of a folder


class TokenWiseConfig(Config):
    """LightRetriever's dense query side: the mean of tokens that are each read after an instruction.

    It is trained through the entire backbone and saved as the table of all tokens' embeddings, which is a
    lookup tower.
    """

    kind: Literal["token_wise"] = "token_wise"
    backbone: BackboneConfig | None = Field(
        None, description="None: the document tower's, with its trained weights and its adapter"
    )
    lora: Lora | None = Field(None, description="for a separate backbone; None trains all weights")
    max_length: int = Field(64, ge=2, description="maximum tokens of a query")
    projection: Start = Field(
        "auto",
        description="the same as in a transformer tower; without a separate backbone, the document tower's",
    )
    reads: Literal["states", "embeddings"] = Field(
        "states",
        description="embeddings: a token's vector is its row in the backbone's input table, without any "
        "layer; a baseline (LightRetriever, Table 4)",
    )
    instruction: str = Field(
        "Retrieve documents that answer the query: ", description="read once, before every token"
    )
    instructions: dict[TaskName, tuple[str, ...]] = Field(
        {},
        description="for the sets of a mixture: each batch is read after an instruction of its set, drawn "
        "at random, in place of `instruction`; the first one of each set gets its own table, tasks/SET",
    )
    tasks: dict[TaskName, str] = Field(
        {},
        description="instructions of further tasks by name: each gets its own table, tasks/NAME, like "
        "LightRetriever's tables per test set (appendix A.4); one that was not used in training is logged",
    )
    storage: Literal["float32", "float16", "int8"] = Field(
        "float16", description="number format of the saved table"
    )

    @property
    def trained_instructions(self) -> tuple[str, ...]:
        """Instructions before queries in training: `instruction`, then those of each set."""
        return (self.instruction, *(text for texts in self.instructions.values() for text in texts))

    def instructions_of(self, name: str) -> tuple[int, ...]:
        """Return the indices of a set's instructions in `trained_instructions`; without any, (0,)."""
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
    """A published embedding model, in place of training by stage I."""

    path: str = Field(
        description="hub id, folder or package:NAME, e.g. BAAI/bge-small-en-v1.5; of a pair, that of "
        "documents"
    )
    weights_sha256: str | None = Field(
        None, description="sha256 of model.safetensors at `path`; other weights are refused. null: any"
    )
    query_path: str | None = Field(
        None, description="of a pair of models, that of queries; null: one model encodes both"
    )
    pooling: Pooling = Field(
        "auto",
        description="auto: from the model's files; for a plain transformer, whose files do not state it, the "
        "last token of a decoder and the mean, or [CLS], of an encoder",
    )
    normalise: bool | None = Field(None, description="embeddings of length 1; null: from the model's files")
    similarity: Literal["cosine", "dot"] | None = Field(
        None,
        description="similarity of a query and a document in search: cosine, or dot, the inner product with "
        "documents that keep their length; null: the model's own (similarity_fn_name), which must rank like "
        "one of these",
    )
    query_prefix: str | None = Field(None, description="prefix of every query; null: the model's own prompt")
    document_prefix: str | None = Field(
        None, description="prefix of every document; null: the model's own prompt"
    )
    query_max_length: int | None = Field(
        None, ge=2, description="maximum tokens of a query; null: the model's maximum"
    )
    document_max_length: int | None = Field(
        None, ge=2, description="maximum tokens of a document; null: the model's maximum"
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
