"""Bodies of requests for embeddings in the forms of OpenAI and of Text Embeddings Inference (TEI).

Fields that are not listed here are accepted and not read, as both servers do.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from scalingnote.serve.messages import Name

InputType = Literal["query", "document", "passage", "search_query", "search_document"]
ROLES: dict[str, Literal["query", "document"]] = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}
TRUNCATE = "false: a text longer than the model reads is refused with 413; null and true: it is cut"
TokenIds = Annotated[list[StrictInt], Field(min_length=1)]
Texts = StrictStr | Annotated[list[StrictStr], Field(min_length=1)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


# --- OpenAI -----------------------------------------------------------------------------------------------


class EmbeddingRequest(_Request):
    """The body of ``POST /v1/embeddings``."""

    input: Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1)] = Field(
        description="a text or several; or token ids of the model's own tokenizer, of one text or of several"
    )
    model: Name = Field(description="a name of /v1/models; NAME-query and NAME-document choose the side")
    dimensions: Annotated[int | None, Field(ge=1, strict=True)] = Field(
        None, description="the first values of each embedding, scaled to length 1 again; null: all"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: of little-endian float32, four bytes a value"
    )
    input_type: InputType | None = Field(None, description="the side that reads the texts; null: by `model`")


class EmbeddingRow(BaseModel):
    """One embedding."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The answer of ``POST /v1/embeddings``: unit embeddings in the order of the input."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: Usage


class Model(BaseModel):
    """A name that requests for embeddings may give."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "scalingnote"


class ModelList(BaseModel):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[Model]


class OpenAIProblem(BaseModel):
    """Why a request is refused, in OpenAI's fields."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIRefusal(BaseModel):
    """The body of every answer below ``/v1`` whose status is not 2xx."""

    error: OpenAIProblem


# --- TEI --------------------------------------------------------------------------------------------------


class TeiRequest(_Request):
    """Texts, and the side that reads them."""

    inputs: Texts
    prompt_name: InputType | None = Field(None, description="the side that reads the texts; null: query")


class TeiEmbedRequest(TeiRequest):
    """The body of ``POST /embed``."""

    truncate: StrictBool | None = Field(None, description=TRUNCATE)
    normalize: StrictBool = Field(True, description="whether every embedding has length 1")
    dimensions: Annotated[int | None, Field(ge=1, strict=True)] = None


class TeiTokenizeRequest(TeiRequest):
    """The body of ``POST /tokenize``."""

    add_special_tokens: StrictBool = True


class TeiRerankRequest(_Request):
    """The body of ``POST /rerank``."""

    query: StrictStr
    texts: Annotated[list[StrictStr], Field(min_length=1)]
    raw_scores: StrictBool = Field(False, description="the model's output, not squashed to 0 to 1")
    return_text: StrictBool = False


class Sentences(_Request):
    """One text, and those that it is compared with."""

    source_sentence: StrictStr
    sentences: Annotated[list[StrictStr], Field(min_length=1)]


class SimilarityParameters(_Request):
    """The side that reads all of the texts."""

    prompt_name: InputType | None = None
    truncate: StrictBool | None = Field(None, description=TRUNCATE)


class TeiSimilarityRequest(_Request):
    """The body of ``POST /similarity``."""

    inputs: Sentences = Field(
        description="the source is read as a query, the others as documents where there is a document tower"
    )
    parameters: SimilarityParameters | None = None


class SparseValue(BaseModel):
    """The weight of a term."""

    index: int
    value: float


class Rank(BaseModel):
    """The score of a text, higher is better."""

    index: int
    score: float
    text: str | None = None


class Token(BaseModel):
    """A token, and the characters of the text that it stands for."""

    id: int
    text: str
    special: bool
    start: int
    stop: int
