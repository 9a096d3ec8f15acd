"""Log lines: one a request at its end and one a state change, as text or JSON, never content.

What may be logged is what `RequestRecord` has a field for (O100): no prompt, no answer, no picture,
no key. A `user` is shown as the start of its hash.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Literal, TextIO

import orjson
import structlog

_UNLOGGED: Final = frozenset({"/health", "/health/live", "/metrics"})
_PLAIN = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """One request as the log and the metrics see it; times in seconds of the monotonic clock."""

    request_id: str
    method: str
    path: str  # as sent, percent-encoded, without the query
    started: float
    id_given: bool = False  # the client's header named the request
    endpoint: str = ""  # the route's path; empty for an unknown one
    key: str = ""
    client_request_id: str = ""
    retries: int = 0
    status: int = 0
    head_at: float | None = None
    stream: bool = False
    model: str = ""
    user: str = ""
    images: int = 0
    prompt_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    sampled_tokens: int = 0  # that the worker sent, whether or not the answer came to its end
    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_at: float | None = None
    finish_reason: str = ""
    error: str = ""
    cancelled: bool = False
    ignored: list[str] = field(default_factory=list)

    def take_id(self, name: str | None) -> None:
        """The field `request_id` names the request where no header did (O25)."""
        if name is not None and not self.id_given:
            self.request_id = name


def configure(form: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Set up the one logger; lines go to standard error unless a stream is given."""
    out = sys.stderr if stream is None else stream
    render: Any = (
        structlog.processors.JSONRenderer(serializer=_json)
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        logger_factory=structlog.PrintLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )


def log_request(record: RequestRecord, now: float) -> None:
    """The line of one request; health and metrics requests have none."""
    if record.endpoint in _UNLOGGED:
        return
    total = now - record.started
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "total_ms": round(total * 1000, 1),
    }
    optional: dict[str, Any] = {
        "key": record.key,
        "client_request_id": record.client_request_id,
        "retry_count": record.retries,
        "stream": record.stream,
        "model": record.model,
        "user": record.user,
        "images": record.images,
        "prompt_tokens": record.prompt_tokens,
        "image_tokens": record.image_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "reasoning_tokens": record.reasoning_tokens,
        "queue_ms": _ms(record.queue_s),
        "first_token_ms": _ms(_since(record.started, record.first_token_at)),
        "tokens_per_s": _rate(record, now),
        "finish_reason": record.finish_reason,
        ("stream_error" if record.status == 200 else "error"): record.error,
        "outcome": "cancelled" if record.cancelled else "",
        "ignored": ",".join(record.ignored),
    }
    fields |= {name: value for name, value in optional.items() if value}
    structlog.get_logger().info("request", **fields)


def log_failure(record: RequestRecord, error: BaseException) -> None:
    """An exception that is nobody's expected outcome: its type and where, never its text.

    The text may quote what a client sent, or what a driver said.
    """
    calls = traceback.extract_tb(error.__traceback__)[-8:]
    structlog.get_logger().error(
        "request failed inside",
        request_id=record.request_id,
        error=type(error).__name__,
        calls=[f"{call.filename}:{call.lineno} {call.name}" for call in calls],
    )


def log_move(before: str, to: str, accepted: bool) -> None:  # noqa: FBT001 - Health's callback
    """A state change, or one that the table does not allow (R99)."""
    log = structlog.get_logger()
    if accepted:
        log.info("state", before=str(before), state=str(to))
    else:
        log.error("state change refused", state=str(before), wanted=str(to))


def shown_user(value: str | None) -> str:
    """A user as the log shows it: the first digits of its hash."""
    return sha256(value.encode()).hexdigest()[:12] if value else ""


def plain(value: str) -> str:
    """A header's value if it can stand in a log line as it is, else nothing."""
    return value if _PLAIN.fullmatch(value) else ""


def _json(fields: Mapping[str, Any], **_: Any) -> str:
    return orjson.dumps(fields, default=str).decode()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


def _rate(record: RequestRecord, now: float) -> float | None:
    if record.first_token_at is None or record.completion_tokens < 2:
        return None
    return round((record.completion_tokens - 1) / max(1e-6, now - record.first_token_at), 1)
