"""GET /v1/models: the models that are served, and their adapters as models of their own."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.methods import offered
from outrider.gateway.models import Models, may_ask, require_allowed
from outrider.rpc.messages import Adapter


class ModelsEndpoint:
    """Answers which models are served here."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        cards = [
            self._card(engine, adapter)
            for engine in self._models.engines
            if may_ask(engine) and (engine.known or len(self._models.engines) == 1)  # others are away
            for adapter in (None, *engine.verifier.info.adapters)
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def retrieve(self, request: Request) -> Response:
        called = request.path_params["model"]
        engine = require_allowed(self._models.called(called))
        name = engine.adapter_called(called)
        adapters = {adapter.name: adapter for adapter in engine.verifier.info.adapters}
        return JSONResponse(self._card(engine, adapters.get(name)))

    def _card(self, engine: GenerationEngine, adapter: Adapter | None = None) -> dict[str, object]:
        """What is said of a model, as vLLM says it. Where an adapter's files lie is nobody's business: its root is its
        name."""
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
