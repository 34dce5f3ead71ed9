"""GET /v1/models: the one model that is served."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.http_errors import no_such_model
from outrider.gateway.service import GenerationEngine


class ModelsEndpoint:
    """What is served here."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """All models."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def retrieve(self, request: Request) -> Response:
        """One model."""
        name = request.path_params["model"]
        if name != self._engine.model_name:
            raise no_such_model(name, self._engine.model_name)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, object]:
        engine = self._engine
        draft = None if engine.drafter is None else engine.drafter.info
        return {
            "id": engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "max_model_len": engine.verifier.info.model.max_model_len,
            "speculation": {
                "num_draft_tokens": engine.config.num_draft_tokens,
                "mode": engine.config.mode,
                "draft": None if draft is None else draft.model.name,
                "methods": [] if draft is None else [method.name for method in draft.methods],
            },
        }
