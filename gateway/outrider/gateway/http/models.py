"""GET /v1/models: the one model that is served, and its adapters as models of their own."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.methods import offered
from outrider.rpc.messages import Adapter


class ModelsEndpoint:
    """Answers which models are served here."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        adapters = self._engine.verifier.info.adapters
        return JSONResponse({"object": "list", "data": [self._card(), *map(self._card, adapters)]})

    async def retrieve(self, request: Request) -> Response:
        name = self._engine.adapter_called(request.path_params["model"])
        adapters = {adapter.name: adapter for adapter in self._engine.verifier.info.adapters}
        return JSONResponse(self._card(adapters.get(name)))

    def _card(self, adapter: Adapter | None = None) -> dict[str, object]:
        """What is said of a model, as vLLM says it. Where an adapter's files lie is nobody's business: its root is its
        name."""
        engine = self._engine
        target, draft = engine.verifier.info, None if engine.drafter is None else engine.drafter.info
        methods = offered(target, draft)
        own = {} if adapter is None else {"rank": adapter.rank}
        name = engine.model_name if adapter is None else adapter.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "root": name,
            "parent": None if adapter is None else engine.model_name,
            **own,
            "modalities": ["text", *(["image"] if engine.media_types else [])],
            "max_model_len": target.model.max_model_len,
            "speculation": {
                "num_draft_tokens": engine.num_draft_tokens,
                "mode": engine.config.mode,
                "draft": None if draft is None else draft.model.name,
                "methods": list(methods),
                "default_methods": list(methods[:1] if draft is None else draft.defaults),
            },
        }
