"""The gRPC side of the gateway: it admits each call, the service answers it, and the call is recorded.

Messages of scalingnote.proto are converted to those of :mod:`scalingnote.serve.messages`, and refusals to
gRPC statuses. The proxy of Serve calls the method of the gateway with the name of the call, and passes the
metadata of the call as `grpc_context`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value
from google.rpc import error_details_pb2, status_pb2
from pydantic import BaseModel, ValidationError
from ray.serve.grpc_util import RayServegRPCContext

from scalingnote.serve import messages
from scalingnote.serve.access import (
    CLIENT_CLOSED_REQUEST,
    Admission,
    RefusedError,
    RequestCallback,
    as_refused,
    request_id,
    validation_refusal,
)
from scalingnote.serve.grpc import scalingnote_pb2 as pb
from scalingnote.serve.grpc.scalingnote_pb2_grpc import ScalingNoteServicer
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import RequestRecord

# The function that adds the servicer to a gRPC server. Serve's proxy imports it.
REGISTER = "scalingnote.serve.grpc.scalingnote_pb2_grpc.add_ScalingNoteServicer_to_server"
M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=Message)
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
MAX_EXACT = 2.0**53  # JSON numbers are doubles, which do not represent all larger integers
MAX_BYTES = 1000  # clients accept about 8 KiB of metadata, which contains the message twice


def _rpc(path: str, model: type[M], empty: type[R]) -> Callable[[Callable[..., Awaitable[R]]], Any]:
    """Decorate a method of a validated body as a gRPC method, which admits and records calls.

    Args:
        path: of the same request over HTTP, for metrics and the access log.
        model: of the body.
        empty: type of the answer; an empty one answers a refused call, with the reason in the status.
    """

    def decorator(handler: Callable[..., Awaitable[R]]) -> Any:
        # Without functools.wraps: Serve looks for `grpc_context` in the signature.
        async def method(self: "Servicer", request: Message, grpc_context: RayServegRPCContext) -> R:
            started, status = time.perf_counter(), 500
            metadata = dict(grpc_context.invocation_metadata())
            record = RequestRecord(request_id(_bytes(metadata, "x-request-id")))
            trailing: list[Any] = [("x-request-id", record.request_id)]
            response = empty()
            with self._admission.count_request():
                try:
                    address, size = _address(grpc_context.peer()), request.ByteSize()
                    self._admission.admit(_bytes(metadata, "authorization"), address, size=size)
                    response = await handler(self, validate_request(request, model), record)
                    status = 200
                except Exception as error:
                    refused = as_refused(error, record.request_id)
                    status, record.refused = refused.status, refused.code
                    details = status_of(refused, record.request_id)
                    grpc_context.set_code(CODES[status])
                    grpc_context.set_details(details.message)
                    trailing.append((DETAILS, details.SerializeToString()))
                except asyncio.CancelledError:
                    status = CLIENT_CLOSED_REQUEST
                    raise
                finally:
                    if self._on_done is not None:
                        self._on_done(path, record, status, time.perf_counter() - started)
            grpc_context.set_trailing_metadata(trailing)
            return response  # type: ignore[no-any-return]  # protobuf

        method.__doc__, method.__name__ = handler.__doc__, handler.__name__
        return method

    return decorator


class Servicer(ScalingNoteServicer):
    """The methods of scalingnote.proto.

    Args:
        service: answers the calls.
        admission: shared with the HTTP side.
        on_done: called for each call after its answer.
    """

    def __init__(
        self, service: Service, admission: Admission, on_done: RequestCallback | None = None
    ) -> None:
        self._service, self._admission, self._on_done = service, admission, on_done

    @_rpc("/search", messages.SearchRequest, pb.SearchResponse)
    async def Search(self, body: messages.SearchRequest, record: RequestRecord) -> pb.SearchResponse:  # noqa: N802
        """Return the best documents for a text or a vector, best first."""
        return search_response(await self._service.search(body, record))

    @_rpc("/similar", messages.SimilarRequest, pb.SearchResponse)
    async def Similar(self, body: messages.SimilarRequest, record: RequestRecord) -> pb.SearchResponse:  # noqa: N802
        """Return documents similar to one of the index."""
        return search_response(await self._service.similar(body, record))

    @_rpc("/encode", messages.EncodeRequest, pb.EncodeResponse)
    async def Encode(self, body: messages.EncodeRequest, _: RequestRecord) -> pb.EncodeResponse:  # noqa: N802
        """Return unit embeddings of queries."""
        answer = await self._service.encode(body)
        embeddings = [{"values": row} for row in answer["embeddings"]]
        return pb.EncodeResponse(**{**answer, "embeddings": embeddings})

    @_rpc("/documents", messages.UpsertRequest, pb.Written)
    async def Upsert(self, body: messages.UpsertRequest, _: RequestRecord) -> pb.Written:  # noqa: N802
        """Write documents. They are durable when this is answered."""
        return pb.Written(**(await self._service.writes.upsert(body)).model_dump())

    @_rpc("/documents/delete", messages.DeleteRequest, pb.Deleted)
    async def Delete(self, body: messages.DeleteRequest, _: RequestRecord) -> pb.Deleted:  # noqa: N802
        """Delete documents. An id that is not in the index is not an error."""
        return pb.Deleted(**(await self._service.writes.delete(body.doc_ids)).model_dump())

    @_rpc("/documents/{doc_id:any}", messages.GetRequest, pb.IndexedDocument)
    async def Get(self, body: messages.GetRequest, _: RequestRecord) -> pb.IndexedDocument:  # noqa: N802
        """Return a document as the index shows it."""
        return pb.IndexedDocument(**_document(await self._service.document(body.doc_id)))


def _bytes(metadata: dict[str, Any], name: str) -> bytes:
    return str(metadata.get(name, "")).encode()


def _address(peer: str) -> str:
    """Return the address in ``ipv4:10.0.0.1:51234`` without the port: one client uses several ports."""
    return peer.partition(":")[2].rpartition(":")[0]


# --- messages ----------------------------------------------------------------------------------------------


def validate_request(request: Message, model: type[M]) -> M:
    """Validate a request like one over HTTP; RefusedError if it is not valid."""
    try:
        return model.model_validate(_fields(request))
    except ValidationError as error:
        raise validation_refusal(error.errors()) from None


def search_response(answer: Mapping[str, Any]) -> pb.SearchResponse:
    """Convert the answer of a search, a :class:`~scalingnote.serve.messages.SearchResponse`."""
    results = [_document(hit) for hit in answer["results"]]
    return pb.SearchResponse(**{**answer, "results": results})


def status_of(refused: RefusedError, request_id: str) -> status_pb2.Status:
    """Build the status of a refusal: code, message, and the standard error details."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=refused.code, domain=DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    message = _shorten(refused.message)
    if refused.field is not None:
        problem = error_details_pb2.BadRequest.FieldViolation(field=_shorten(refused.field))
        details.append(error_details_pb2.BadRequest(field_violations=[problem]))
    if refused.retry_after_s is not None:
        delay = duration_pb2.Duration(seconds=refused.retry_after_s)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    wrappers = [any_pb2.Any() for _ in details]
    for wrapper, detail in zip(wrappers, details, strict=True):
        wrapper.Pack(detail)
    number, _ = CODES.get(refused.status, grpc.StatusCode.UNKNOWN).value
    return status_pb2.Status(code=number, message=message, details=wrappers)


def _fields(message: Message) -> dict[str, Any]:
    """Return the fields that are set, in the form of the pydantic models."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    """Convert a value to the one that JSON would give: a number without a fraction is an integer."""
    match value:
        case pb.Document():
            fields = _fields(value)
            return {**fields.pop("features", {}), **fields}
        case Struct():
            return {name: _plain(each) for name, each in value.fields.items()}
        case ListValue():
            return [_plain(each) for each in value.values]
        case Value():
            kind = value.WhichOneof("kind")
            return None if kind in (None, "null_value") else _plain(getattr(value, kind))
        case float() if value.is_integer() and abs(value) <= MAX_EXACT:
            return int(value)
        case str() | bool() | int() | float():
            return value
    return [_plain(each) for each in value]


def _document(hit: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a hit or a document; fields that only this index has become entries of ``fields``."""
    known_fields = {name: value for name, value in hit.items() if name in _NAMED}
    return {**known_fields, "fields": {name: value for name, value in hit.items() if name not in _NAMED}}


_NAMED = frozenset(pb.Hit.DESCRIPTOR.fields_by_name) - {"fields"}


def _shorten(text: str) -> str:
    """Cut a text to MAX_BYTES, because it may quote a long part of the request."""
    data = text.encode(errors="replace")
    return text if len(data) <= MAX_BYTES else data[:MAX_BYTES].decode(errors="ignore") + "…"
