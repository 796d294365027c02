"""The server's description of itself at `/openapi.json`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from axon.serve.http.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)

JSON = "application/json"
POSTED: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue texts"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/v1/embeddings": (EmbeddingBody, "Embed texts"),
    "/v1/load_lora_adapter": (LoadAdapterBody, "Serve an adapter"),
    "/v1/unload_lora_adapter": (UnloadAdapterBody, "Serve an adapter no more"),
    "/tokenize": (TokenizeBody, "The ids of a text or a conversation"),
    "/detokenize": (DetokenizeBody, "The text of ids"),
}
GOT = {
    "/v1/models": (JSON, "The model and the adapters that are served"),
    "/v1/models/{model}": (JSON, "One of them by its name"),
    "/tokenizer_info": (JSON, "The tokenizer's special tokens"),
    "/health": (JSON, "Whether requests are taken"),
    "/state": (JSON, "What the engine does now"),
    "/metrics": ("text/plain", "Counts, for Prometheus"),
}
"""Path → its body, or what is answered; and a summary."""

OPEN = ("/health",)
"""Paths that need no key."""

MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def description() -> dict[str, Any]:
    """OpenAPI 3.1."""
    bodies = [(body, "validation") for body, _ in POSTED.values()]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # pyright: ignore
    paths = {path: {"post": _posted(path, body, summary)} for path, (body, summary) in POSTED.items()}
    paths |= {path: {"get": _operation(path, summary, media)} for path, (media, summary) in GOT.items()}
    paths["/v1/models/{model}"]["get"]["parameters"] = [MODEL]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Axon", "version": "1", "description": "A model served as OpenAI's API has it."},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _posted(path: str, body: type[BaseModel], summary: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    operation = _operation(path, summary, JSON)
    if "stream" in body.model_fields:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {**operation, "requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _operation(path: str, summary: str, media: str) -> dict[str, Any]:
    error = {"description": "What was wrong", "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    answer = {"description": summary, "content": {media: {"schema": {"type": "object" if media == JSON else "string"}}}}
    security = [] if path in OPEN else [{}, {"key": []}]
    return {"summary": summary, "security": security, "responses": {"200": answer, "4XX": error, "503": error}}
