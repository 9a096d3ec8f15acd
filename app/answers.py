"""one generation: a `Generate` goes out, deltas come in, tokens and times are counted.

Chat and plain completions differ in how a prompt is made and how a chunk is written; what lies
between is here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import orjson

from app.chat.events import Delta, Done, Usage
from app.chat.prompt import Prompt
from app.chat.stream import deltas
from app.gate import listed
from app.logs import RequestRecord, shown_user
from app.schemas.generation import FieldContext, GenerationFields
from app.schemas.shared import ignored_names
from app.services import Services
from engine.errors import RequestError
from engine.messages import Event, Finished, Generate, Loaded, RequestId, Sampling, Token

_ALL_TOKENS: Final = 2**31 - 1  # more than any vocabulary, and still a plain integer elsewhere
_MERGED: Final = 64  # deltas of several prompts that may wait for a slow reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What all chunks of one answer have in common."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def fields(self) -> dict[str, Any]:
        """The first fields of an answer or a chunk."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "service_tier": "default",
        }

    def opening(self) -> bytes:
        """The start of every event of a stream, up to where `choices` begins."""
        return b"data: " + orjson.dumps(self.fields())[:-1] + b',"choices":'


def field_context(services: Services, loaded: Loaded) -> FieldContext:
    """What the fields of a request are checked against."""
    config = services.config
    return FieldContext(config.limits, loaded.vocab, lenient_history=config.lenient_history)


def note_request(record: RequestRecord, fields: GenerationFields) -> None:
    """Write down what the log and `x-ignored-params` tell of a request that was understood."""
    record.model = fields.model
    record.stream = fields.streams
    record.user = shown_user(fields.user or fields.safety_identifier)
    record.ignored = listed(ignored_names(fields))
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        record.ignored.append("stream_options.include_obfuscation")


def note_prompts(
    services: Services,
    record: RequestRecord,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    bound_name: str,
) -> None:
    """Write down what the prompts cost.

    Raises:
        RequestError: `min_tokens` is more than the context leaves.
    """
    record.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    record.image_tokens = sum(prompt.image_tokens for prompt in prompts)
    record.images = sum(len(prompt.pictures) for prompt in prompts)
    for prompt in prompts:
        if prompt.pictures:
            services.metrics.decoded(prompt.decode_s)
        if prompt.cut_to is not None:
            record.ignored.append(f"{bound_name}={prompt.cut_to}")
        if (fields.min_tokens or 0) > prompt.max_tokens:
            raise RequestError(
                f"min_tokens: {fields.min_tokens} is more than the {prompt.max_tokens} tokens that "
                "the context leaves.",
                param="min_tokens",
            )


def generation(
    services: Services,
    fields: GenerationFields,
    prompt: Prompt,
    record: RequestRecord,
    *,
    name: str,
    split_reasoning: bool,
) -> AsyncGenerator[Delta, None]:
    """The deltas of one answer; closing the generator aborts it.

    Args:
        services: the door to the worker, and the prompter.
        fields: the request.
        prompt: what it became.
        record: counts and times go there.
        name: of this generation in the worker.
        split_reasoning: False for a raw prompt, whose answer is all text.
    """
    plan = services.prompter.answer_plan(
        prompt,
        stop=fields.stop or (),
        stop_token_ids=fields.stop_token_ids or (),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        split_reasoning=split_reasoning,
    )
    generate = Generate(
        request=RequestId(name),
        prompt=prompt.tokens,
        pictures=prompt.pictures,
        sampling=_sampling(services, fields),
        max_tokens=prompt.max_tokens,
        min_tokens=fields.min_tokens or 0,
        stop_ids=plan.stop_ids,
        cache_salt=fields.cache_salt or "",
    )
    return deltas(_observed(services, generate, record), plan)


async def merged(
    answers: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several answers as they come, each with its choice; one error ends all."""
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(_MERGED)

    async def pump(index: int, answer: AsyncGenerator[Delta, None]) -> None:
        async with aclosing(answer):
            try:
                async for delta in answer:
                    await queue.put((index, delta))
                await queue.put((index, None))
            except Exception as error:  # noqa: BLE001 - raised again where it is read
                await queue.put((index, error))

    pumps = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    try:
        left = len(pumps)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


def running_usage(prompt: Prompt, delta: Delta) -> Usage:
    """The counts of an answer up to this delta (`continuous_usage_stats`)."""
    if isinstance(delta, Done):
        return delta.usage
    return Usage(
        prompt_tokens=len(prompt.tokens),
        completion_tokens=delta.completion_tokens,
        reasoning_tokens=delta.reasoning_tokens,
        cached_tokens=delta.cached_tokens,
        image_tokens=prompt.image_tokens,
    )


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """Tokens of one request over all its choices (O36)."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    images = sum(usage.image_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "image_tokens": images,
            "text_tokens": prompt - images,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def usage_tail(usages: Sequence[Usage]) -> bytes:
    """The end of an event that carries usage."""
    return b',"usage":' + orjson.dumps(usage_body(usages)) + b"}\n\n"


def note_usage(record: RequestRecord, usage: Usage, finish_reason: str) -> None:
    """Write down how an answer ended."""
    record.cached_tokens += usage.cached_tokens
    record.completion_tokens += usage.completion_tokens
    record.reasoning_tokens += usage.reasoning_tokens
    record.finish_reason = finish_reason


async def _observed(
    services: Services, generate: Generate, record: RequestRecord
) -> AsyncGenerator[Event, None]:
    """The events of one request, with their times noted on the way."""
    observe = services.metrics.observe_between
    last = 0.0
    async with aclosing(services.client.submit(generate)) as events:
        async for event in events:
            if type(event) is Token:
                now = monotonic()
                record.sampled_tokens += 1
                if last:
                    observe(now - last)
                elif record.first_token_at is None:
                    record.first_token_at = now
                last = now
            elif type(event) is Finished:
                record.queue_s = event.queue_s
                record.prefill_s = event.prefill_s
            yield event


def _sampling(services: Services, fields: GenerationFields) -> Sampling:
    """What the request says, else what the checkpoint says (O29); the seed is always there."""
    defaults = services.prompter.defaults
    top_k = defaults.top_k if fields.top_k is None else min(max(0, fields.top_k), _ALL_TOKENS)
    return Sampling(
        temperature=_chosen(fields.temperature, defaults.temperature),
        top_p=_chosen(fields.top_p, defaults.top_p),
        top_k=top_k,
        min_p=_chosen(fields.min_p, defaults.min_p),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
    )


def _chosen(given: float | None, default: float) -> float:
    return default if given is None else given
