"""one request in, one answer or one stream out"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response

from app.answers import (
    Heading,
    field_context,
    generation,
    note_prompts,
    note_request,
    note_usage,
    running_usage,
    usage_body,
    usage_tail,
)
from app.bodies import read_body
from app.chat.events import Delta, Done, ReasoningDelta, TextDelta
from app.chat.prompt import Prompt
from app.documented import ANSWERS_POST, documented, takes
from app.health import Asks
from app.logs import RequestRecord
from app.schemas.chat import ChatChunk, ChatCompletion, ChatRequest, check_chat
from app.schemas.generation import FieldContext
from app.schemas.messages import for_template
from app.schemas.shared import parsed
from app.services import record_of, services_of
from app.sse import EventStream, while_connected

router = APIRouter(default_response_class=Response, tags=["generation"])

# O34: where the thinking of an answer stands, by the setting `reasoning-field`.
REASONING_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
    "none": (),
}
_RESPONSES: Any = documented(ChatCompletion, ANSWERS_POST, chunk=ChatChunk)


@router.post("/v1/chat/completions", responses=_RESPONSES, openapi_extra=takes(ChatRequest))
@router.post("/v1/chat", responses=_RESPONSES, openapi_extra=takes(ChatRequest))
async def chat(request: Request) -> Response:
    """Answer a conversation, whole or as a stream (sections 4 to 8 and 12)."""
    services, record = services_of(request), record_of(request)
    loaded = services.serving(Asks.GENERATION)
    context = field_context(services, loaded)
    fields, messages = await read_body(
        request, services.config.limits, lambda body: _understood(body, context)
    )
    services.check_model(fields.model)
    note_request(record, fields)
    record.take_id(fields.request_id)
    async with while_connected(request.receive):
        prompt = await services.prompter.chat(
            messages,
            loaded,
            max_tokens=fields.bound,
            bound_name=fields.bound_name,
        )
        note_prompts(services, record, fields, [prompt], fields.bound_name)
        answer = generation(
            services, fields, prompt, record, name=record.request_id, split_reasoning=True
        )
        heading = Heading(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            object="chat.completion.chunk" if fields.streams else "chat.completion",
            created=int(time.time()),
            model=fields.model,
            fingerprint=request.app.state.identity.fingerprint,
        )
        names = REASONING_NAMES[services.config.reasoning_field]
        if not fields.streams:
            whole = await _whole(answer, heading, record, fields.metadata, names)
            return Response(orjson.dumps(whole), media_type="application/json")
    return EventStream(
        _chunks(answer, prompt, heading, record, fields, names),
        keep_alive_s=services.config.keep_alive_s,
        record=record,
    )


def _understood(
    body: dict[str, Any], context: FieldContext
) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """The fields, and the messages as templates are given them."""
    fields = parsed(ChatRequest, body, context)
    check_chat(fields, context)
    return fields, for_template(fields.messages)


async def _whole(
    answer: AsyncGenerator[Delta, None],
    heading: Heading,
    record: RequestRecord,
    metadata: dict[str, str] | None,
    reasoning_names: Sequence[str],
) -> dict[str, Any]:
    """The answer without streaming (section 5): the joined deltas (O87)."""
    text: list[str] = []
    thought: list[str] = []
    done: Done | None = None
    async with aclosing(answer):
        async for delta in answer:
            match delta:
                case TextDelta():
                    text.append(delta.text)
                case ReasoningDelta():
                    thought.append(delta.text)
                case Done():
                    done = delta
    if done is None:
        raise RuntimeError("an answer ended without telling how")
    note_usage(record, done.usage, done.finish_reason)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(text),
        "refusal": None,
        "annotations": [],
    }
    if thought:
        message |= dict.fromkeys(reasoning_names, "".join(thought))
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
    }
    body = {**heading.fields(), "choices": [choice], "usage": usage_body([done.usage])}
    return {**body, "metadata": metadata} if metadata else body


async def _chunks(
    answer: AsyncGenerator[Delta, None],
    prompt: Prompt,
    heading: Heading,
    record: RequestRecord,
    fields: ChatRequest,
    reasoning_names: Sequence[str],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream in the order of O80; joined bytes, because there are thousands."""
    options = fields.stream_choices
    opening = heading.opening()
    plain_tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"

    def chunk(delta: bytes, tail: bytes, end: bytes = b'"finish_reason":null') -> bytes:
        return b'%s[{"index":0,"delta":%s,"logprobs":null,%s}]%s' % (opening, delta, end, tail)

    first = True
    async with aclosing(answer):
        async for delta in answer:
            tail = plain_tail
            if options.continuous_usage_stats:
                tail = usage_tail([running_usage(prompt, delta)])
            if first:
                # with the first delta, not before: until then a refusal has its own status (O78)
                yield chunk(b'{"role":"assistant","content":""}', tail)
                first = False
            match delta:
                case TextDelta():
                    yield chunk(b'{"content":%s}' % orjson.dumps(delta.text), tail)
                case ReasoningDelta() if reasoning_names:
                    yield chunk(orjson.dumps(dict.fromkeys(reasoning_names, delta.text)), tail)
                case Done():
                    note_usage(record, delta.usage, delta.finish_reason)
                    end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                    yield chunk(b"{}", tail, orjson.dumps(end)[1:-1])
                    if options.include_usage:
                        yield b"%s[]%s" % (opening, usage_tail([delta.usage]))
