"""Between messages of scalingnote.proto and what the service takes and gives; refusals become statuses."""

from collections.abc import Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value
from google.rpc import error_details_pb2, status_pb2
from pydantic import BaseModel, ValidationError

from scalingnote.serve.grpc import scalingnote_pb2 as pb
from scalingnote.serve.refusals import RefusedError, not_valid

CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
DETAILS = "grpc-status-details-bin"  # the metadata that holds a google.rpc.Status
DOMAIN = "scalingnote"
_EXACT = 2.0**53  # whole numbers up to here are told apart as doubles
_MESSAGE = 1000  # bytes of a message: a client takes about 8 KiB of metadata, in which it is spelt twice

M = TypeVar("M", bound=BaseModel)


def asked(request: Message, model: type[M]) -> M:
    """A request, checked as its like over HTTP is; RefusedError when it does not pass."""
    try:
        return model.model_validate(_fields(request))
    except ValidationError as error:
        raise not_valid(error.errors()) from None


def found(answer: Mapping[str, Any]) -> pb.SearchResponse:
    """The answer of a search, as :class:`~scalingnote.serve.messages.SearchResponse` describes it."""
    results = [_document(hit) for hit in answer["results"]]
    return pb.SearchResponse(**{**answer, "results": results})


def document(answer: Mapping[str, Any]) -> pb.IndexedDocument:
    """A document as the index shows it."""
    return pb.IndexedDocument(**_document(answer))


def encoded(answer: Mapping[str, Any]) -> pb.EncodeResponse:
    """Embeddings of queries."""
    embeddings = [{"values": row} for row in answer["embeddings"]]
    return pb.EncodeResponse(**{**answer, "embeddings": embeddings})


def status(refused: RefusedError, request_id: str) -> status_pb2.Status:
    """The one form of every refusal: code and message, and the standard details that say more."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=refused.code, domain=DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    message = _short(refused.message)
    if refused.field is not None:
        problem = error_details_pb2.BadRequest.FieldViolation(field=_short(refused.field))
        details.append(error_details_pb2.BadRequest(field_violations=[problem]))
    if refused.retry_after_s is not None:
        delay = duration_pb2.Duration(seconds=refused.retry_after_s)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for box, detail in zip(packed, details, strict=True):
        box.Pack(detail)
    number, _ = CODES.get(refused.status, grpc.StatusCode.UNKNOWN).value
    return status_pb2.Status(code=number, message=message, details=packed)


def _fields(message: Message) -> dict[str, Any]:
    """The fields that were sent, as the models take them."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    match value:
        case pb.Document():
            sent = _fields(value)
            return {**sent.pop("features", {}), **sent}
        case Struct():
            return {name: _plain(each) for name, each in value.fields.items()}
        case Value():
            return _of_value(value)
        case str() | bool() | int() | float():
            return value
    return [_plain(each) for each in value]


def _of_value(value: Value) -> Any:
    match value.WhichOneof("kind"):
        case "null_value" | None:
            return None
        case "struct_value":
            return _plain(value.struct_value)
        case "list_value":
            return [_of_value(each) for each in value.list_value.values]
        case "number_value" if value.number_value.is_integer() and abs(value.number_value) <= _EXACT:
            return int(value.number_value)
        case kind:
            return getattr(value, kind)


def _document(hit: Mapping[str, Any]) -> dict[str, Any]:
    """A hit or a document, with the fields that only this index has in one of their own."""
    own = {name: value for name, value in hit.items() if name in _NAMED}
    return {**own, "fields": {name: value for name, value in hit.items() if name not in _NAMED}}


_NAMED = frozenset(pb.Hit.DESCRIPTOR.fields_by_name) - {"fields"}


def _short(text: str) -> str:
    """A text with what it quotes, cut to what metadata holds."""
    whole = text.encode(errors="replace")
    return text if len(whole) <= _MESSAGE else whole[:_MESSAGE].decode(errors="ignore") + "…"
