"""Translation between messages of scalingnote.proto and the service's; refusals become gRPC statuses."""

from collections.abc import Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value
from google.rpc import error_details_pb2, status_pb2
from pydantic import BaseModel, ValidationError

from scalingnote.serve.access import RefusedError, validation_refusal
from scalingnote.serve.grpc import scalingnote_pb2 as pb

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
MAX_EXACT = 2.0**53  # integers above it are not exact as doubles, which JSON numbers are
MAX_BYTES = 1000  # clients accept about 8 KiB of metadata, which has the message twice

M = TypeVar("M", bound=BaseModel)


def validated(request: Message, model: type[M]) -> M:
    """A request, validated as over HTTP; RefusedError when it is not valid."""
    try:
        return model.model_validate(_fields(request))
    except ValidationError as error:
        raise validation_refusal(error.errors()) from None


def search_response(answer: Mapping[str, Any]) -> pb.SearchResponse:
    """The answer of a search, as :class:`~scalingnote.serve.messages.SearchResponse` describes it."""
    results = [_document(hit) for hit in answer["results"]]
    return pb.SearchResponse(**{**answer, "results": results})


def indexed_document(answer: Mapping[str, Any]) -> pb.IndexedDocument:
    """A document as the index shows it."""
    return pb.IndexedDocument(**_document(answer))


def encode_response(answer: Mapping[str, Any]) -> pb.EncodeResponse:
    """Embeddings of queries."""
    embeddings = [{"values": row} for row in answer["embeddings"]]
    return pb.EncodeResponse(**{**answer, "embeddings": embeddings})


def status(refused: RefusedError, request_id: str) -> status_pb2.Status:
    """The status of every refusal: code, message, and the standard error details."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=refused.code, domain=DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    message = _shortened(refused.message)
    if refused.field is not None:
        problem = error_details_pb2.BadRequest.FieldViolation(field=_shortened(refused.field))
        details.append(error_details_pb2.BadRequest(field_violations=[problem]))
    if refused.retry_after_s is not None:
        delay = duration_pb2.Duration(seconds=refused.retry_after_s)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for packed_detail, detail in zip(packed, details, strict=True):
        packed_detail.Pack(detail)
    number, _ = CODES.get(refused.status, grpc.StatusCode.UNKNOWN).value
    return status_pb2.Status(code=number, message=message, details=packed)


def _fields(message: Message) -> dict[str, Any]:
    """The fields that are set, in the form of the pydantic models."""
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
        case "number_value" if value.number_value.is_integer() and abs(value.number_value) <= MAX_EXACT:
            return int(value.number_value)
        case kind:
            return getattr(value, kind)


def _document(hit: Mapping[str, Any]) -> dict[str, Any]:
    """A hit or a document; fields that only this index has are entries of ``fields``."""
    known = {name: value for name, value in hit.items() if name in _NAMED}
    return {**known, "fields": {name: value for name, value in hit.items() if name not in _NAMED}}


_NAMED = frozenset(pb.Hit.DESCRIPTOR.fields_by_name) - {"fields"}


def _shortened(text: str) -> str:
    """A text cut to what metadata can hold; it may quote a part of the request."""
    whole = text.encode(errors="replace")
    return text if len(whole) <= MAX_BYTES else whole[:MAX_BYTES].decode(errors="ignore") + "…"
