"""The gRPC side of the gateway: each call passes admission, asks the service, and is counted on its way out.

Serve's proxy hands a call to the method of its name on the gateway, with its metadata as `grpc_context`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel
from ray.serve.grpc_util import RayServegRPCContext

from scalingnote.serve import messages
from scalingnote.serve.admission import Admission, request_id
from scalingnote.serve.door import GAVE_UP, Done
from scalingnote.serve.grpc import scalingnote_pb2 as pb
from scalingnote.serve.grpc import translate
from scalingnote.serve.grpc.scalingnote_pb2_grpc import ScalingNoteServicer
from scalingnote.serve.log import get_logger
from scalingnote.serve.refusals import RefusedError
from scalingnote.serve.service import Service

# What Serve's proxy imports.
REGISTER = "scalingnote.serve.grpc.scalingnote_pb2_grpc.add_ScalingNoteServicer_to_server"
State = dict[
    str, Any
]  # what is known of a call: its `request_id`, the `note` of a search, the code `refused`
M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=Message)
log = get_logger()


def _call(path: str, model: type[M], empty: type[R]) -> Callable[[Callable[..., Awaitable[R]]], Any]:
    """Make a method of gRPC of one that takes a checked body; it counts as `path`, its like over HTTP."""

    def called(work: Callable[..., Awaitable[R]]) -> Any:
        # Not as functools.wraps does it: Serve looks for `grpc_context` in the signature.
        async def method(self: "Servicer", request: Message, grpc_context: RayServegRPCContext) -> R:
            async def answer(state: State) -> R:
                return await work(self, translate.asked(request, model), state)

            found = await self._through(path, answer, request.ByteSize(), grpc_context)
            return empty() if found is None else found  # type: ignore[no-any-return]  # protobuf has no types

        method.__doc__, method.__name__ = work.__doc__, work.__name__
        return method

    return called


class Servicer(ScalingNoteServicer):
    """The methods of scalingnote.proto."""

    def __init__(self, service: Service, admission: Admission, done: Done | None = None) -> None:
        """`done` is told of each call when it is answered."""
        self._service, self._admission, self._done = service, admission, done

    @_call("/search", messages.SearchRequest, pb.SearchResponse)
    async def Search(self, body: messages.SearchRequest, state: State) -> pb.SearchResponse:  # noqa: N802
        """The best documents for a text or a vector, best first."""
        state["note"] = note = self._service.note(body, state["request_id"])
        return translate.found(await self._service.search(body, state["request_id"], note))

    @_call("/similar", messages.SimilarRequest, pb.SearchResponse)
    async def Similar(self, body: messages.SimilarRequest, state: State) -> pb.SearchResponse:  # noqa: N802
        """Documents like one of the index."""
        return translate.found(await self._service.similar(body, state["request_id"]))

    @_call("/encode", messages.EncodeRequest, pb.EncodeResponse)
    async def Encode(self, body: messages.EncodeRequest, _: State) -> pb.EncodeResponse:  # noqa: N802
        """Unit embeddings of queries."""
        return translate.encoded(await self._service.encode(body))

    @_call("/documents", messages.UpsertRequest, pb.Written)
    async def Upsert(self, body: messages.UpsertRequest, _: State) -> pb.Written:  # noqa: N802
        """Write documents; durable when it is answered."""
        return pb.Written(**(await self._service.upsert(body)).model_dump())

    @_call("/documents/delete", messages.DeleteRequest, pb.Deleted)
    async def Delete(self, body: messages.DeleteRequest, _: State) -> pb.Deleted:  # noqa: N802
        """Delete documents; ids that are not there are no error."""
        return pb.Deleted(**(await self._service.delete(body.doc_ids)).model_dump())

    @_call("/documents/{doc_id:path}", messages.GetRequest, pb.IndexedDocument)
    async def Get(self, body: messages.GetRequest, _: State) -> pb.IndexedDocument:  # noqa: N802
        """A document as the index shows it."""
        return translate.document(await self._service.document(body.doc_id))

    async def _through(
        self, path: str, answer: Callable[[State], Awaitable[R]], size: int, context: RayServegRPCContext
    ) -> R | None:
        """The answer; None when it is refused, and the context says why."""
        started, status = time.perf_counter(), 500
        sent = dict(context.invocation_metadata())
        state = {"request_id": request_id(_bytes(sent, "x-request-id"))}
        metadata: list[Any] = [("x-request-id", state["request_id"])]
        found = None
        with self._admission.visit():
            try:
                self._admission.admit(_bytes(sent, "authorization"), _address(context.peer()), size=size)
                found, status = await answer(state), 200
            except Exception as error:
                refused = _refusal(error, state["request_id"])
                status, state["refused"] = refused.status, refused.code
                said = translate.status(refused, state["request_id"])
                context.set_code(translate.CODES[status])
                context.set_details(said.message)
                metadata.append((translate.DETAILS, said.SerializeToString()))
            except asyncio.CancelledError:
                status = GAVE_UP
                raise
            finally:
                if self._done is not None:
                    self._done(path, state, status, time.perf_counter() - started)
        context.set_trailing_metadata(metadata)
        return found


def _refusal(error: Exception, named: str) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    log.error("request %s failed", named, exc_info=error)
    return RefusedError(500, "internal", "this is a fault of the server: see its log")


def _bytes(metadata: dict[str, Any], name: str) -> bytes:
    return str(metadata.get(name, "")).encode()


def _address(peer: str) -> str:
    """Without kind and port, ``ipv4:10.0.0.1:51234``: a client has more than one connection."""
    return peer.partition(":")[2].rpartition(":")[0]
