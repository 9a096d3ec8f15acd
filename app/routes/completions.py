"""the same for plain prompts"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.answers import (
    Heading,
    field_context,
    generation,
    merged,
    note_prompts,
    note_request,
    note_usage,
    running_usage,
    usage_body,
    usage_tail,
)
from app.bodies import read_body
from app.chat.events import Delta, Done, TextDelta, Usage
from app.chat.prompt import Prompt
from app.documented import ANSWERS_POST, documented, takes
from app.health import Asks
from app.logs import RequestRecord
from app.schemas.completions import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChunk,
    CompletionRequest,
    check_completion,
)
from app.schemas.shared import parsed
from app.services import record_of, services_of
from app.sse import EventStream, while_connected

router = APIRouter(default_response_class=Response, tags=["generation"])

_RESPONSES: Any = documented(Completion, ANSWERS_POST, chunk=CompletionChunk)


@router.post("/v1/completions", responses=_RESPONSES, openapi_extra=takes(CompletionRequest))
async def completions(request: Request) -> Response:
    """Go on with one or several raw prompts; choice i answers prompt i (O88)."""
    services, record = services_of(request), record_of(request)
    loaded = services.serving(Asks.GENERATION)
    context = field_context(services, loaded)
    fields = await read_body(
        request, services.config.limits, lambda body: parsed(CompletionRequest, body, context)
    )
    check_completion(fields)
    services.check_model(fields.model)
    note_request(record, fields)
    record.take_id(fields.request_id)
    special = fields.add_special_tokens is not False
    async with while_connected(request.receive):
        prompts = await asyncio.gather(
            *(
                services.prompter.text(
                    text,
                    loaded,
                    max_tokens=fields.max_tokens,
                    unasked=DEFAULT_MAX_TOKENS,
                    add_special_tokens=special,
                )
                for text in fields.prompt
            )
        )
        note_prompts(services, record, fields, prompts, "max_tokens")
        heading = Heading(
            id=f"cmpl-{secrets.token_hex(12)}",
            object="text_completion",
            created=int(time.time()),
            model=fields.model,
            fingerprint=request.app.state.identity.fingerprint,
        )
        answers = merged(
            [
                generation(
                    services,
                    fields,
                    prompt,
                    record,
                    name=record.request_id if len(prompts) == 1 else f"{record.request_id}.{index}",
                    split_reasoning=False,
                )
                for index, prompt in enumerate(prompts)
            ]
        )
        if not fields.streams:
            whole = await _whole(answers, len(prompts), heading, record, fields.metadata)
            return Response(orjson.dumps(whole), media_type="application/json")
    return EventStream(
        _chunks(answers, prompts, heading, record, fields),
        keep_alive_s=services.config.keep_alive_s,
        record=record,
    )


async def _whole(
    answers: AsyncGenerator[tuple[int, Delta], None],
    count: int,
    heading: Heading,
    record: RequestRecord,
    metadata: dict[str, str] | None,
) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(count)]
    ends: dict[int, Done] = {}
    async with aclosing(answers):
        async for index, delta in answers:
            match delta:
                case TextDelta():
                    texts[index].append(delta.text)
                case Done():
                    ends[index] = delta
                    note_usage(record, delta.usage, delta.finish_reason)
    choices = [_choice(index, "".join(texts[index]), ends[index]) for index in range(count)]
    usage = usage_body([ends[index].usage for index in range(count)])
    body = {**heading.fields(), "choices": choices, "usage": usage}
    return {**body, "metadata": metadata} if metadata else body


async def _chunks(
    answers: AsyncGenerator[tuple[int, Delta], None],
    prompts: Sequence[Prompt],
    heading: Heading,
    record: RequestRecord,
    fields: CompletionRequest,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; choices interleave as they come."""
    options = fields.stream_choices
    opening = heading.opening()
    plain_tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
    running: dict[int, Usage] = {}
    ended: list[Usage] = []
    async with aclosing(answers):
        async for index, delta in answers:
            tail = plain_tail
            if options.continuous_usage_stats:
                running[index] = running_usage(prompts[index], delta)
                tail = usage_tail(list(running.values()))
            match delta:
                case TextDelta():
                    text = orjson.dumps(delta.text)
                    end = b'"finish_reason":null,"stop_reason":null'
                case Done():
                    note_usage(record, delta.usage, delta.finish_reason)
                    ended.append(delta.usage)
                    text = b'""'
                    told = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                    end = orjson.dumps(told)[1:-1]
                case _:
                    continue
            choice = b'{"index":%d,"text":%s,"logprobs":null,%s}' % (index, text, end)
            yield b"%s[%s]%s" % (opening, choice, tail)
    if options.include_usage:
        yield b"%s[]%s" % (opening, usage_tail(ended))


def _choice(index: int, text: str, done: Done) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
    }
