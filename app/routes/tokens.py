"""/tokenize and /detokenize: what a request would cost, and back to text"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.answers import field_context
from app.bodies import read_body
from app.documented import ANSWERS_POST, documented, takes
from app.health import Asks
from app.schemas.generation import FieldContext
from app.schemas.messages import for_template
from app.schemas.shared import parsed
from app.schemas.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    check_tokenize,
)
from app.services import services_of
from app.sse import while_connected

router = APIRouter(default_response_class=Response, tags=["tokens"])


@router.post(
    "/tokenize", responses=documented(Tokenized, ANSWERS_POST), openapi_extra=takes(TokenizeRequest)
)
async def tokenize(request: Request) -> Response:
    """The token ids of a raw prompt or of a chat, image rows included (O91)."""
    services = services_of(request)
    loaded = services.serving(Asks.TOKENS)
    context = field_context(services, loaded)
    fields, messages = await read_body(
        request, services.config.limits, lambda body: _understood(body, context)
    )
    if fields.model is not None:
        services.check_model(fields.model)
    prompter = services.prompter
    async with while_connected(request.receive):
        if fields.prompt is not None:
            special = fields.add_special_tokens is not False
            ids = await prompter.tokenize_text(fields.prompt, loaded, add_special_tokens=special)
        else:
            ids = await prompter.tokenize(
                messages,
                loaded,
                add_generation_prompt=fields.add_generation_prompt is not False,
            )
    texts = [prompter.tokenizer.decode([token]) for token in ids]
    return _answer(
        {
            "count": len(ids),
            "max_model_len": loaded.context,
            "tokens": ids,
            "token_strs": texts if fields.return_token_strs else None,
        }
    )


@router.post(
    "/detokenize",
    responses=documented(Detokenized, ANSWERS_POST),
    openapi_extra=takes(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens by name."""
    services = services_of(request)
    loaded = services.serving(Asks.TOKENS)
    context = field_context(services, loaded)
    fields = await read_body(
        request, services.config.limits, lambda body: parsed(DetokenizeRequest, body, context)
    )
    if fields.model is not None:
        services.check_model(fields.model)
    return _answer({"prompt": services.prompter.tokenizer.decode(fields.tokens)})


def _understood(
    body: dict[str, Any], context: FieldContext
) -> tuple[TokenizeRequest, list[dict[str, Any]]]:
    """The fields, and the messages as templates are given them."""
    fields = parsed(TokenizeRequest, body, context)
    check_tokenize(fields, context)
    return fields, for_template(fields.messages or [])


def _answer(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
