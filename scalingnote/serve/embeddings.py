"""Embeddings for clients of other servers: OpenAI's ``/v1/embeddings``, and the paths of TEI.

    texts, token ids ─► side (query or document) ─► tower ─► dimensions, length ─► float or base64

Embeddings have length 1. If the model compares by dot, embeddings of both sides keep their length.

A model has two sides. A request names one by `input_type` (TEI: `prompt_name`), or by the name of the model
followed by ``-query`` or ``-document``. Without either, texts are queries.
"""

import asyncio
import base64
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32
from numpy import ndarray
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr

from scalingnote.core import __version__
from scalingnote.models.published_model import Role, Similarity
from scalingnote.run.service_config import ENCODING_DEADLINE_S, ServeConfig
from scalingnote.serve import messages
from scalingnote.serve.access import RefusedError, conflict, invalid, unavailable
from scalingnote.serve.concurrency import Handle, at, gather_in_time
from scalingnote.serve.deployed import Deployed
from scalingnote.serve.messages import MAX_RERANKED, Body, Name
from scalingnote.serve.towers import Embedded, Refused, Side
from scalingnote.serve.versions import Versions
from scalingnote.storage.arrow import as_searched, l2_normalize

MAX_TOKENS = 8192  # token ids of one text in a request
MAX_TEXTS = 2048  # of one request
MAX_TEXT_CHARS = 32_768  # of a text to embed: towers read its first tokens
InputType = Literal["query", "document", "passage", "search_query", "search_document"]
Direction = Literal["Left", "Right", "left", "right"]  # TEI and its clients use upper and lower case
PROMPT_ROLES: dict[str, Role] = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}
TokenIds = Annotated[list[StrictInt], Field(min_length=1)]
TextInput = StrictStr | Annotated[list[StrictStr], Field(min_length=1)]


# --- messages of OpenAI -----------------------------------------------------------------------------------


class EmbeddingRequest(Body):
    """The body of ``POST /v1/embeddings``."""

    input: TextInput | TokenIds | Annotated[list[TokenIds], Field(min_length=1)] = Field(
        description="one text or several; or token ids of the model's tokenizer, of one text or of several"
    )
    model: Name = Field(description="a name of /v1/models; NAME-query and NAME-document choose the side")
    dimensions: Annotated[int | None, Field(ge=1, strict=True)] = Field(
        None,
        description="the first values of each embedding, scaled to length 1 again if the model compares by "
        "cosine; null: all",
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: of little-endian float32, four bytes per value"
    )
    input_type: InputType | None = Field(None, description="the side that reads the texts; null: by `model`")
    user: StrictStr | None = Field(None, description="a field of OpenAI that has no effect here")


class EmbeddingRow(BaseModel):
    """One embedding."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int
    cut_texts: int = Field(description="texts of the request that are longer than the model reads")
    lost_tokens: int = Field(description="tokens of these texts that were not read")


class EmbeddingList(BaseModel):
    """The answer of ``POST /v1/embeddings``, in the order of the input. Only dot models keep lengths."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: Usage


class Model(BaseModel):
    """A name of a model that requests for embeddings may use."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "scalingnote"


class ModelList(BaseModel):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[Model]


class OpenAIProblem(BaseModel):
    """The reason why a request is refused, in OpenAI's fields."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIRefusal(BaseModel):
    """The body of every answer below ``/v1`` with a status other than 2xx."""

    error: OpenAIProblem


# --- messages of TEI --------------------------------------------------------------------------------------


class TeiRequest(Body):
    """Texts, and the side that reads them."""

    inputs: TextInput
    prompt_name: InputType | None = Field(None, description="the side that reads the texts; null: query")


class Truncation(Body):
    """The treatment of a text that is longer than the model reads."""

    truncate: StrictBool | None = Field(None, description="null and true: the text is cut; false: 413")
    truncation_direction: Direction | None = Field(
        None, description="Left: its end is read; Right: its beginning; null: as the model was trained"
    )

    def options(self) -> dict[str, Any]:
        """Return the arguments for methods of a tower: whether texts are cut, and the side that is read."""
        sides: dict[str | None, Side] = {"Left": "right", "left": "right", "Right": "left", "right": "left"}
        return {
            "truncate": self.truncate is not False,
            "keeps": sides.get(self.truncation_direction),
        }


class TeiSparseRequest(TeiRequest, Truncation):
    """The body of ``POST /embed_sparse``. A text is refused with 413 if its end is to be read."""


class TeiEmbedRequest(TeiRequest, Truncation):
    """The body of ``POST /embed``."""

    normalize: StrictBool | None = Field(
        None,
        description="whether embeddings are scaled to length 1; null: if the model compares by cosine",
    )
    dimensions: Annotated[int | None, Field(ge=1, strict=True)] = None


class TeiTokenizeRequest(TeiRequest):
    """The body of ``POST /tokenize``."""

    add_special_tokens: StrictBool = True


class TeiRerankRequest(Truncation):
    """The body of ``POST /rerank``. A text is refused with 413 if its other side is to be read."""

    query: StrictStr
    texts: Annotated[list[StrictStr], Field(min_length=1)]
    raw_scores: StrictBool = Field(False, description="the model's output, not squashed to 0 to 1")
    return_text: StrictBool = False


class Sentences(Body):
    """One text, and the texts that it is compared with."""

    source_sentence: StrictStr
    sentences: Annotated[list[StrictStr], Field(min_length=1)]


class SimilarityParameters(Truncation):
    """The side that reads all texts, and the treatment of long texts."""

    prompt_name: InputType | None = None


class TeiSimilarityRequest(Body):
    """The body of ``POST /similarity``."""

    inputs: Sentences = Field(
        description="the source is read as a query, the others as documents if there is a document tower"
    )
    parameters: SimilarityParameters | None = None


class SparseValue(BaseModel):
    """The weight of a term."""

    index: int
    value: float


class Rank(BaseModel):
    """The score of a text; higher is better."""

    index: int
    score: float
    text: str | None = None


class Token(BaseModel):
    """A token, and its characters in the text."""

    id: int
    text: str
    special: bool
    start: int
    stop: int


# --- answers ----------------------------------------------------------------------------------------------


class EmbeddingService:
    """Answers to requests for embeddings, computed by the towers of an application.

    The name of the model means the first arm. Without an arm, the model reads only documents. Embeddings of a
    model that compares by dot keep their length.

    Args:
        deployed: the towers.
        config: limits.
        versions: of the index; the towers of the active one answer. None: the model is served without an
            index.
    """

    def __init__(self, deployed: Deployed, config: ServeConfig, versions: Versions | None = None) -> None:
        self._own_similarity, self._config, self._created = deployed.similarity, config, int(time.time())
        self._versions = versions
        self.name, self._documents, self._reranker = deployed.name, deployed.documents, deployed.reranker
        self._queries = [arm.encoder for arm in deployed.arms]
        self._dim, self._refused_settings = 0, ""
        self._models: dict[str, tuple[Handle | None, Role | None]] = {}
        encoders: dict[str, Handle | None] = {arm.name: arm.encoder for arm in deployed.arms}
        encoders[self.name] = self._queries[0] if self._queries else None  # even if an arm has this name
        for model, encoder in encoders.items():
            self._models |= {model: (encoder, None), f"{model}-query": (encoder, "query")}
        self._models[f"{self.name}-document"] = (self._documents, "document")

    @property
    def _similarity(self) -> Similarity:
        """The similarity of the model that answers now."""
        if self._versions is None:
            return self._own_similarity
        return self._versions.content(self._versions.active.name).layout.similarity

    def take_settings(self, config: ServeConfig, *, refused: str) -> None:
        """Apply other limits and deadline; `refused`: why the latest settings are not valid."""
        self._config, self._refused_settings = config, refused

    async def start(self) -> None:
        """Encode a text to learn the dimension of embeddings; for a model that is served without an index."""
        tower = self._side(self.name, None if self._queries else "document")
        self._dim = (await self._embed(tower, ["a"])).vectors.shape[1]

    # --- OpenAI ---------------------------------------------------------------------------------------

    def models(self) -> ModelList:
        """Answer ``GET /v1/models``: the names that :meth:`openai` takes."""
        names = [name for name, (tower, _) in self._models.items() if tower is not None]
        return ModelList(data=[Model(id=name, created=self._created) for name in sorted(names)])

    def model(self, name: str) -> Model:
        """Answer ``GET /v1/models/{name}``; RefusedError (404) for a name that is not served."""
        self._side(name, None)
        return Model(id=name, created=self._created)

    async def openai(self, request: EmbeddingRequest) -> dict[str, Any]:
        """Answer ``POST /v1/embeddings`` by an :class:`EmbeddingList`.

        Raises:
            RefusedError: 404 for an unknown model, 422 for a request beyond the limits, 503 if the tower does
                not answer.
        """
        tower = self._side(request.model, request.input_type)
        embedded = await self._embed_input(tower, request.input)
        scale = self._similarity == "cosine"
        vectors = await asyncio.to_thread(_cut, embedded.vectors, request.dimensions, scale=scale)
        values: Sequence[Any] = (
            [base64.b64encode(row).decode() for row in vectors.astype("<f4")]
            if request.encoding_format == "base64"
            else vectors.tolist()
        )
        data = [{"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(values)]
        usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
        usage |= {"cut_texts": embedded.cut_texts, "lost_tokens": embedded.lost_tokens}
        return {"object": "list", "data": data, "model": request.model, "usage": usage}

    # --- TEI ------------------------------------------------------------------------------------------

    async def embed(self, request: TeiEmbedRequest) -> tuple[list[list[float]], dict[str, str]]:
        """Answer ``POST /embed``: an embedding of each text, and headers with the counts of tokens.

        TEI has ``x-compute-tokens``; the other headers have the names of the fields of :class:`Usage`.
        """
        tower, texts = self._side(self.name, request.prompt_name), self._check(request.inputs, "inputs")
        embedded = await self._embed(tower, texts, request)
        vectors = embedded.vectors
        scale = self._similarity == "cosine" if request.normalize is None else request.normalize
        if scale or request.dimensions is not None:
            vectors = _cut(vectors, request.dimensions, scale=scale)
        rows: list[list[float]] = vectors.tolist()
        counts = {"x-compute-tokens": embedded.tokens - embedded.lost_tokens}
        counts |= {"x-cut-texts": embedded.cut_texts, "x-lost-tokens": embedded.lost_tokens}
        return rows, {name: str(count) for name, count in counts.items()}

    async def embed_sparse(self, request: TeiSparseRequest) -> list[list[dict[str, Any]]]:
        """Answer ``POST /embed_sparse``: terms of each query and their weights."""
        texts = self._check(request.inputs, "inputs")
        if PROMPT_ROLES[request.prompt_name or "query"] == "document" or not self._queries:
            raise conflict("only queries have terms here: those of documents are in the index")
        tower = self._side(self.name, "query")
        rows = await self._answer(tower.terms.remote(texts, **request.options()), conflict)
        return [[{"index": term, "value": value} for term, value in zip(*row, strict=True)] for row in rows]

    async def rerank(self, request: TeiRerankRequest) -> list[dict[str, Any]]:
        """Answer ``POST /rerank``: the cross-encoder's scores of texts for a query, best first."""
        if self._reranker is None:
            raise conflict("this server does not re-rank: set serve.rerank")
        if len(request.texts) > MAX_RERANKED:
            raise invalid(f"{len(request.texts)} texts: up to {MAX_RERANKED} are re-ranked", "texts")
        (query,), texts = self._check([request.query], "query"), self._check(request.texts, "texts")
        call = self._reranker.logits.remote(query, texts, **request.options())
        logits = np.asarray(await self._answer(call, invalid, field="texts"))
        scores = logits if request.raw_scores else 1 / (1 + np.exp(-logits))
        order = np.argsort(-scores, kind="stable").tolist()
        ranks = [{"index": n, "score": float(scores[n])} for n in order]
        return [rank | {"text": texts[rank["index"]]} for rank in ranks] if request.return_text else ranks

    async def similarity(self, request: TeiSimilarityRequest) -> list[float]:
        """Answer ``POST /similarity``: cosines, or inner products, of one text and others."""
        parameters = request.parameters or SimilarityParameters()
        side = parameters.prompt_name
        (source,) = self._check([request.inputs.source_sentence], "inputs.source_sentence")
        sentences = self._check(request.inputs.sentences, "inputs.sentences")
        other_side = side or ("document" if self._documents is not None else "query")
        first = await self._embed(self._side(self.name, side or "query"), [source], parameters)
        second = await self._embed(self._side(self.name, other_side), sentences, parameters)
        one, many = (as_searched(each.vectors, self._similarity) for each in (first, second))
        scores: list[float] = (many @ one[0]).tolist()
        return scores

    async def tokenize(self, request: TeiTokenizeRequest) -> list[list[dict[str, Any]]]:
        """Answer ``POST /tokenize``: the tokens of each text."""
        tower, texts = self._side(self.name, request.prompt_name), self._check(request.inputs, "inputs")
        rows: list[list[dict[str, Any]]] = await self._answer(
            tower.tokenize.remote(texts, special=request.add_special_tokens), invalid
        )
        return rows

    # --- state ----------------------------------------------------------------------------------------

    def info(self, dim: int | None = None) -> messages.TowerInfo:
        """Answer ``GET /info`` of a model without an index. With an index, `dim` is its dimension."""
        return messages.TowerInfo(
            name="ScalingNote",
            version=__version__,
            dim=dim or self._dim,
            rerank=self._reranker is not None,
            model_id=self.name,
            model_dtype="float32",
            model_type={"embedding": {"pooling": "model"}},
            max_concurrent_requests=self._config.limits.in_flight,
            max_client_batch_size=MAX_TEXTS,
            auto_truncate=True,
        )

    async def health(self) -> messages.Health:
        """Answer ``GET /healthz`` of a model without an index: whether its towers answer."""
        calls = [tower.ping.remote() for tower in (*self._queries, self._documents) if tower is not None]
        answers = await gather_in_time(calls, deadline_s=self._config.deadline_s)
        silent = ["user_config"] * bool(self._refused_settings)
        status = "ok" if all(answers) and not silent else "degraded" if any(answers) else "down"
        return messages.Health(
            status=status, encoder_answers=all(answers), shards=0, shards_answered=0, silent=silent
        )

    # --- parts ----------------------------------------------------------------------------------------

    def _side(self, model: str, input_type: str | None) -> Handle:
        """Return the tower that reads the texts of a request."""
        if model not in self._models:
            names = ", ".join(card.id for card in self.models().data)
            raise RefusedError(404, f"no model {model!r}, there are {names}", "model", code="model_not_found")
        tower, fixed_role = self._models[model]
        role = fixed_role if input_type is None else PROMPT_ROLES[input_type]
        if fixed_role is not None and role != fixed_role:
            raise invalid(
                f"model {model!r} reads texts of type {fixed_role}, not {input_type!r}", "input_type"
            )
        if role == "document":
            tower = self._documents
        if tower is None:
            raise conflict(
                "no document tower is served here: set serve.deployments.document_tower.num_replicas"
                if role == "document"
                else "this model reads only documents"
            )
        return tower if self._versions is None else at(tower, self._versions.active.name)

    async def _embed_input(self, tower: Handle, value: Any) -> Embedded:
        """Compute the embeddings of `input` in any of its forms."""
        if isinstance(value, str) or isinstance(value[0], str):
            return await self._embed(tower, self._check(value, "input"))
        rows = [value] if isinstance(value[0], int) else value
        self._check_count(len(rows), "input")
        if max(map(len, rows)) > MAX_TOKENS:
            raise invalid(f"a text has more than {MAX_TOKENS} tokens", "input")
        embedded: Embedded = await self._answer(tower.embed_ids.remote(rows), partial(invalid, field="input"))
        return embedded

    def _check(self, value: str | Sequence[str], field: str) -> list[str]:
        texts = [value] if isinstance(value, str) else [*value]
        self._check_count(len(texts), field)
        for number, text in enumerate(texts):
            if len(text) > MAX_TEXT_CHARS:
                raise invalid(f"text {number} has {len(text)} characters: send up to {MAX_TEXT_CHARS}", field)
        return texts

    def _check_count(self, texts: int, field: str) -> None:
        if texts > MAX_TEXTS:
            raise invalid(f"{texts} texts: send up to {MAX_TEXTS}", field)

    async def _embed(self, tower: Handle, texts: list[str], truncation: Truncation | None = None) -> Embedded:
        options = (truncation or Truncation()).options()
        embedded: Embedded = await self._answer(tower.embed.remote(texts, **options), invalid)
        return embedded

    async def _answer(self, call: Awaitable[Any], refused: Any, *, field: str = "inputs") -> Any:
        """Return the answer of a tower.

        RefusedError (503) if there is none in time; the error of `refused` if the tower refuses the call.
        """
        (answer,) = await gather_in_time([call], deadline_s=ENCODING_DEADLINE_S)
        if answer is None:
            raise unavailable("the tower does not answer: try again, with fewer texts if they are many")
        if isinstance(answer, Refused):
            if answer.too_long:  # a text is longer than the model reads, and may not be cut: TEI answers 413
                raise RefusedError(413, answer.reason, field, code="too_long")
            raise refused(answer.reason)
        return answer


def _cut(
    vectors: Float32[ndarray, "texts dim"], dimensions: int | None, *, scale: bool
) -> Float32[ndarray, "texts kept"]:
    """Return the first `dimensions` values of each embedding, scaled to length 1 if `scale` is set."""
    dim = vectors.shape[1]
    if dimensions is not None and dimensions > dim:
        raise invalid(f"dimensions is {dimensions}: embeddings have {dim}", "dimensions")
    values: Float32[ndarray, "texts kept"] = vectors[:, :dimensions]
    return np.ascontiguousarray(l2_normalize(values) if scale else values)
