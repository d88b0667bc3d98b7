"""Routes whose handler takes the body, as its model: the bytes go to pydantic, and nothing lies between.

FastAPI would turn them into Python values first, and look for dependencies, of which there are none here: on
the way of a search that takes longer than all the rest of HTTP. OpenAPI describes both alike.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from serve.refusals import RefusedError, invalid, not_valid

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


def post(api: FastAPI, path: str, *, answer: type[BaseModel]) -> Callable[[Handler], Handler]:
    """``POST path``, handled by a function of (body) or (body, request) whose response is an `answer`."""

    def add(handler: Handler) -> Handler:
        api.router.add_api_route(
            path, handler, methods=["POST"], response_model=answer, route_class_override=_BodyRoute
        )
        return handler

    return add


class _BodyRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's hook: what answers a request."""
        parameters = list(inspect.signature(self.endpoint).parameters.values())
        model, handler, wants_request = parameters[0].annotation, self.endpoint, len(parameters) > 1

        async def handle(request: Request) -> Any:
            try:
                body = model.model_validate_json(await request.body())
            except ValidationError as error:
                raise _refusal(error) from None
            except ClientDisconnect:
                raise RefusedError(400, "invalid", "the body ended early") from None
            return await (handler(body, request) if wants_request else handler(body))

        return handle


def _refusal(error: ValidationError) -> RefusedError:
    problems = error.errors(include_url=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        return invalid(f"the body is no JSON: {problems[0]['ctx']['error']}")
    return not_valid(problems)
