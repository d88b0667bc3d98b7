"""The gRPC side of the gateway: each call passes admission, is answered by the service, and is recorded.

Serve's proxy calls the gateway's method of the same name, with the call's metadata as `grpc_context`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel
from ray.serve.grpc_util import RayServegRPCContext

from scalingnote.serve import messages
from scalingnote.serve.access import (
    CLIENT_CLOSED_REQUEST,
    Admission,
    RefusedError,
    RequestCallback,
    request_id,
)
from scalingnote.serve.grpc import scalingnote_pb2 as pb
from scalingnote.serve.grpc import translate
from scalingnote.serve.grpc.scalingnote_pb2_grpc import ScalingNoteServicer
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import get_logger

# The function that adds the servicer to a gRPC server, which Serve's proxy imports.
REGISTER = "scalingnote.serve.grpc.scalingnote_pb2_grpc.add_ScalingNoteServicer_to_server"
# Of a call: its `request_id`, the `record` of a search, the code it was `refused` with.
State = dict[str, Any]
M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=Message)
log = get_logger()


def _rpc(path: str, model: type[M], empty: type[R]) -> Callable[[Callable[..., Awaitable[R]]], Any]:
    """Make a gRPC method of one that takes a validated body.

    Args:
        path: of the same request over HTTP, for metrics and the access log.
        model: of the body.
        empty: the answer of a refused call, whose status says why.
    """

    def decorator(handler: Callable[..., Awaitable[R]]) -> Any:
        # Without functools.wraps: Serve looks for `grpc_context` in the signature.
        async def method(self: "Servicer", request: Message, grpc_context: RayServegRPCContext) -> R:
            async def answer(state: State) -> R:
                return await handler(self, translate.validated(request, model), state)

            response = await self._admit_and_answer(path, answer, request.ByteSize(), grpc_context)
            return empty() if response is None else response  # type: ignore[no-any-return]  # protobuf

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
    async def Search(self, body: messages.SearchRequest, state: State) -> pb.SearchResponse:  # noqa: N802
        """The best documents for a text or a vector, best first."""
        state["record"] = record = self._service.record(body, state["request_id"])
        return translate.search_response(await self._service.search(body, state["request_id"], record))

    @_rpc("/similar", messages.SimilarRequest, pb.SearchResponse)
    async def Similar(self, body: messages.SimilarRequest, state: State) -> pb.SearchResponse:  # noqa: N802
        """Documents like one of the index."""
        return translate.search_response(await self._service.similar(body, state["request_id"]))

    @_rpc("/encode", messages.EncodeRequest, pb.EncodeResponse)
    async def Encode(self, body: messages.EncodeRequest, _: State) -> pb.EncodeResponse:  # noqa: N802
        """Unit embeddings of queries."""
        return translate.encode_response(await self._service.encode(body))

    @_rpc("/documents", messages.UpsertRequest, pb.Written)
    async def Upsert(self, body: messages.UpsertRequest, _: State) -> pb.Written:  # noqa: N802
        """Write documents; durable when it is answered."""
        return pb.Written(**(await self._service.writes.upsert(body)).model_dump())

    @_rpc("/documents/delete", messages.DeleteRequest, pb.Deleted)
    async def Delete(self, body: messages.DeleteRequest, _: State) -> pb.Deleted:  # noqa: N802
        """Delete documents; ids that are not in the index are no error."""
        return pb.Deleted(**(await self._service.writes.delete(body.doc_ids)).model_dump())

    @_rpc("/documents/{doc_id:path}", messages.GetRequest, pb.IndexedDocument)
    async def Get(self, body: messages.GetRequest, _: State) -> pb.IndexedDocument:  # noqa: N802
        """A document as the index shows it."""
        return translate.indexed_document(await self._service.document(body.doc_id))

    async def _admit_and_answer(
        self, path: str, answer: Callable[[State], Awaitable[R]], size: int, context: RayServegRPCContext
    ) -> R | None:
        """The answer; None when the call is refused, and its context has the status."""
        started, status = time.perf_counter(), 500
        metadata = dict(context.invocation_metadata())
        state = {"request_id": request_id(_bytes(metadata, "x-request-id"))}
        trailing: list[Any] = [("x-request-id", state["request_id"])]
        response = None
        with self._admission.count_request():
            try:
                self._admission.admit(_bytes(metadata, "authorization"), _address(context.peer()), size=size)
                response, status = await answer(state), 200
            except Exception as error:
                refused = _as_refused(error, state["request_id"])
                status, state["refused"] = refused.status, refused.code
                details = translate.status(refused, state["request_id"])
                context.set_code(translate.CODES[status])
                context.set_details(details.message)
                trailing.append((translate.DETAILS, details.SerializeToString()))
            except asyncio.CancelledError:
                status = CLIENT_CLOSED_REQUEST
                raise
            finally:
                if self._on_done is not None:
                    self._on_done(path, state, status, time.perf_counter() - started)
        context.set_trailing_metadata(trailing)
        return response


def _as_refused(error: Exception, request_id: str) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    log.error("request %s failed", request_id, exc_info=error)
    return RefusedError(500, "internal", "this is a fault of the server: see its log")


def _bytes(metadata: dict[str, Any], name: str) -> bytes:
    return str(metadata.get(name, "")).encode()


def _address(peer: str) -> str:
    """The address in ``ipv4:10.0.0.1:51234``: one client opens several connections, each from a port."""
    return peer.partition(":")[2].rpartition(":")[0]
