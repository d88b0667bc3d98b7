"""Why a request is not answered: a status, a code for programs, a message for people."""

from collections.abc import Mapping, Sequence
from typing import Any


class RefusedError(Exception):
    """Raised anywhere in the gateway; the client gets it as :class:`~scalingnote.serve.messages.Refusal`."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.field, self.retry_after_s = field, retry_after_s


def invalid(message: str, field: str | None = None) -> RefusedError:
    """The request cannot be answered by anyone: 422."""
    return RefusedError(422, "invalid", message, field)


def not_found(message: str) -> RefusedError:
    """404."""
    return RefusedError(404, "not_found", message)


def conflict(message: str) -> RefusedError:
    """This server, as it is set up, does not do that: 409."""
    return RefusedError(409, "conflict", message)


def unavailable(message: str) -> RefusedError:
    """Not now: 503."""
    return RefusedError(503, "unavailable", message, retry_after_s=1)


def not_valid(problems: Sequence[Mapping[str, Any]]) -> RefusedError:
    """422 that says where and why, of what pydantic found in a request.

    The input is not repeated: NaN, say, has no place in JSON.
    """
    first, *more = problems
    where = ".".join(str(step) for step in first["loc"]) or None
    return invalid(first["msg"] + (f" (and {len(more)} more)" if more else ""), where)


def body_of(refused: RefusedError, request_id: str) -> dict[str, Any]:
    """The one form of every refusal."""
    problem = {"code": refused.code, "message": refused.message, "field": refused.field}
    return {"error": problem, "request_id": request_id}
