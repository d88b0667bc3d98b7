"""Routes whose handler takes the body, as its model, and a short way to them.

FastAPI would turn the bytes into Python values first, look for dependencies, of which there are none, and
enter exit stacks behind layers of middleware: for a search that takes longer than the rest of HTTP. OpenAPI
describes these routes as it does the others.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from scalingnote.serve.refusals import RefusedError, invalid, not_valid

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


def post(api: FastAPI, path: str, *, answer: type[BaseModel]) -> Callable[[Handler], Handler]:
    """``POST path``, handled by a function of (body) or (body, request) whose response is an `answer`."""

    def add(handler: Handler) -> Handler:
        api.router.add_api_route(
            path, handler, methods=["POST"], response_model=answer, route_class_override=_BodyRoute
        )
        return handler

    return add


class Shortcut:
    """ASGI middleware: requests for these routes go to their handlers, all others to the API."""

    def __init__(self, app: ASGIApp, *, api: FastAPI) -> None:
        """`api` has all its routes by now; what it makes of an exception, this makes of it, too."""
        self._app, self._refuse = app, api.exception_handlers
        self._routes = {route.path: route for route in api.routes if isinstance(route, _BodyRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.answer(request)
        except Exception as error:
            refuse: Any = next(self._refuse[kind] for kind in type(error).__mro__ if kind in self._refuse)
            response = await refuse(request, error)
        await response(scope, receive, send)


class _BodyRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's hook: what answers a request."""
        parameters = list(inspect.signature(self.endpoint).parameters.values())
        self._model, self._wants_request = parameters[0].annotation, len(parameters) > 1
        return self.answer

    async def answer(self, request: Request) -> Any:
        """What the handler makes of the body; RefusedError where it is none."""
        try:
            body = self._model.model_validate_json(await request.body())
        except ValidationError as error:
            raise _refusal(error) from None
        except ClientDisconnect:
            raise RefusedError(400, "invalid", "the body ended early") from None
        return await (self.endpoint(body, request) if self._wants_request else self.endpoint(body))


def _refusal(error: ValidationError) -> RefusedError:
    problems = error.errors(include_url=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        return invalid(f"the body is no JSON: {problems[0]['ctx']['error']}")
    return not_valid(problems)
