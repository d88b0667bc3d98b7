"""An object of this process, called as a deployment is: the gateway need not know where its parts are."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle


class Method(Protocol):
    """An asynchronous method, here or elsewhere."""

    def remote(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call it."""
        ...


class Here:
    """An object whose asynchronous methods are called as ``here.method.remote(...)``."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Method:
        return _Method(getattr(self.target, name))


class _Method:
    def __init__(self, method: Any) -> None:
        self.remote = method


async def everywhere(of: DeploymentHandle[Any] | Here, method: str, *args: Any) -> list[Any]:
    """Call a method of every replica; what each answered."""
    if isinstance(of, Here):
        return [await getattr(of, method).remote(*args)]
    return list(await asyncio.to_thread(of.broadcast(method, *args).results))
