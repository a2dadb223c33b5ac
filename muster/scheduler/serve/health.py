"""The standard gRPC health service, for callers with a valid certificate."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health

from muster.scheduler.access import Access, address_of
from muster.scheduler.audit.logs import Recorder
from muster.scheduler.errors import UnauthenticatedError, status_of


class GuardedHealth(health.aio.HealthServicer):
    """The standard health service, for callers with a valid certificate."""

    def __init__(self, access: Access, recorder: Recorder) -> None:
        super().__init__()
        self._access = access
        self._recorder = recorder

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answers whether a service can serve at present."""
        await self._guard("Check", context)
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Streams whether a service can serve, now and after each change."""
        await self._guard("Watch", context)
        return await super().Watch(request, context)

    async def _guard(self, call: str, context: Any) -> None:
        try:
            self._access.authenticate(context)
        except UnauthenticatedError as error:
            code, text = status_of(error)
            self._recorder.denied(call, None, address_of(context.peer()), error.refusal, text)
            await context.abort(code, text)
