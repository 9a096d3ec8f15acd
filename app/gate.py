"""What every request passes before its route, and what every answer carries.

In the order of O1: path, method, key; the route then checks state, content type, size, JSON and
fields. Whatever goes wrong below becomes one error object here (O5), and the request's one log
line and its counts are written here at its end (O17, O18, O100).
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from time import monotonic
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config import ApiKey
from app.errors import ErrorAnswer, TransportRefused, answer_of, shown
from app.logs import RequestRecord, log_failure, log_request, plain
from app.metrics import Metrics
from app.sse import ClientGone
from engine.errors import ServerError

RECORD: Final = "stagelight.record"  # key of the scope
OPEN_PATHS: Final = frozenset({"/health", "/health/live"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RETRIES = re.compile(r"[0-9]{1,6}")
_IGNORED_NAME = re.compile(r"[A-Za-z0-9_.=-]+")
_BELOW_V1 = re.compile(r"/chat/completions|/completions|/models(/.*)?")
_IGNORED_NAMES, _IGNORED_BYTES = 10, 512

# O3: first parts, behind /v1/, of OpenAI paths that this server does not offer.
_OTHER_ENDPOINTS: Final = frozenset(
    {
        *("assistants", "audio", "batches", "conversations", "containers", "decisions"),
        *("edits", "embeddings", "engines", "evals", "files", "fine-tunes", "fine_tuning"),
        *("images", "moderations", "organization", "projects", "realtime", "rerank"),
        *("responses", "score", "skills", "threads", "uploads", "vector_stores", "videos"),
    }
)
_STORED: Final = "chat/completions/"  # with an id behind it: an answer that was stored


class Keys:
    """The accepted keys; replaced as a whole when the file is read again."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(key.name, key.value.encode()) for key in keys]

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """From now on these are accepted, and no others."""
        self._keys = [(key.name, key.value.encode()) for key in keys]

    @property
    def needed(self) -> bool:
        return bool(self._keys)

    def name_of(self, headers: Headers) -> str:
        """The name of the key that these headers carry; "" when no key is needed (O15).

        Raises:
            TransportRefused: `missing_api_key` or `invalid_api_key`.
        """
        if not self._keys:
            return ""
        offered = list(_offered(headers))
        if not offered:
            raise TransportRefused(
                "missing_api_key", "This server needs a key: send Authorization: Bearer KEY."
            )
        found = ""
        for value in offered:
            for name, key in self._keys:  # every one, so that time tells nothing
                if hmac.compare_digest(value, key):
                    found = name
        if not found:
            raise TransportRefused("invalid_api_key", "This key is not known here.")
        return found


class Gate:
    """The one middleware.

    Args:
        app: what comes next.
        routes: the router's own list; what is not there is 404.
        keys: the accepted keys.
        metrics: where ended requests are counted.
        open_paths: those that need no key.
        root_path: what stands before every path but the health ones (O4).
        unversioned_paths: whether paths below /v1 are also taken without it (O4).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        keys: Keys,
        metrics: Metrics,
        open_paths: frozenset[str] = OPEN_PATHS,
        root_path: str = "",
        unversioned_paths: bool = False,
    ) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._metrics = metrics
        self._open_paths = open_paths
        self._root_path = root_path
        self._unversioned_paths = unversioned_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = _record_of(scope)
        inner = {**scope, RECORD: record}
        silent = scope["method"] == "HEAD"
        if silent:
            inner["method"] = "GET"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                _complete_head(message, record)
            elif silent and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            self._check(inner, record)
            await self._app(inner, receive, answer)
        except ClientGone:
            record.cancelled = True
        except Exception as error:
            if not isinstance(error, ServerError):
                log_failure(record, error)
            told = answer_of(error)
            record.error = told.code
            if record.head_at is not None:
                raise
            await _send_error(told, answer)
        finally:
            now = monotonic()
            self._metrics.ended(record, now)
            log_request(record, now)

    def _check(self, scope: Scope, record: RequestRecord) -> None:
        """Path, method, key; the path becomes the one that routes know.

        Raises:
            TransportRefused: one of them is wrong.
        """
        asked: str = scope["path"]
        path = scope["path"] = self._routed(asked)
        if path.endswith("/"):
            # no path of this server ends so, and none is redirected (O2)
            raise _unknown(scope["method"], asked, path)
        allowed: set[str] = set()
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is not Match.NONE and isinstance(route, Route):
                record.endpoint = route.path
                allowed |= route.methods or set()
                if match is Match.FULL:
                    break
        else:
            record.endpoint = route.path if allowed and isinstance(route, Route) else ""
            method = scope["method"]
            raise (
                _wrong_method(asked, method, allowed) if allowed else _unknown(method, asked, path)
            )
        if path not in self._open_paths:
            record.key = self._keys.name_of(Headers(scope=scope))

    def _routed(self, asked: str) -> str:
        """The path as the routes know it; "/" for one that is not below the root path (O4)."""
        if asked in OPEN_PATHS:
            return asked
        path = asked.removeprefix(self._root_path)
        if self._root_path and (path == asked or not path.startswith("/") or path in OPEN_PATHS):
            return "/"
        short = self._unversioned_paths and _BELOW_V1.fullmatch(path)
        return f"/v1{path}" if short else path


def _record_of(scope: Scope) -> RequestRecord:
    headers = Headers(scope=scope)
    given = headers.get("x-request-id", "")
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    retries = headers.get("x-stainless-retry-count", "")
    taken = _REQUEST_ID.fullmatch(given) is not None
    return RequestRecord(
        request_id=given if taken else f"req_{secrets.token_hex(16)}",
        id_given=taken,
        method=plain(scope["method"]),
        path=raw.partition(b"?")[0].decode("ascii", "backslashreplace")[:256],
        started=monotonic(),
        client_request_id=plain(headers.get("x-client-request-id", "")),
        retries=int(retries) if _RETRIES.fullmatch(retries) else 0,
    )


def _complete_head(message: Message, record: RequestRecord) -> None:
    """The headers that every answer has (O17, O18)."""
    record.head_at = monotonic()
    record.status = message["status"]
    headers = MutableHeaders(raw=message["headers"])
    headers["x-request-id"] = record.request_id
    headers["openai-processing-ms"] = str(int((record.head_at - record.started) * 1000))
    if record.ignored and record.status == 200:
        headers["x-ignored-params"] = ", ".join(listed(record.ignored))
    message["headers"] = headers.raw


def listed(names: Sequence[str]) -> list[str]:
    """Names of fields without effect: at most 10, at most 512 bytes, plain characters (O22)."""
    short = [name for name in names if _IGNORED_NAME.fullmatch(name)][:_IGNORED_NAMES]
    while short and len(", ".join(short)) > _IGNORED_BYTES:
        short.pop()
    return short


async def _send_error(told: ErrorAnswer, send: Send) -> None:
    headers = {
        "content-type": "application/json",
        "content-length": str(len(told.body)),
        **told.headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": told.status, "headers": raw})
    await send({"type": "http.response.body", "body": told.body})


def _offered(headers: Headers) -> Sequence[bytes]:
    """The keys in these headers, as bytes: what is no ASCII is simply another key (O15)."""
    found = []
    for name, value in headers.raw:
        if name == b"x-api-key":
            found.append(value.strip(b" "))
        elif name == b"authorization":
            scheme, _, key = value.strip(b" ").partition(b" ")
            found.append(key.strip(b" ") if scheme.lower() == b"bearer" else b"")
    return found


def _unknown(method: str, asked: str, path: str) -> TransportRefused:
    """`asked` is shown, and `path` says whether the hosted API has such an endpoint (O3)."""
    version, _, rest = path.removeprefix("/").partition("/")
    stored = rest.startswith(_STORED) and rest != _STORED
    if version == "v1" and (stored or rest.partition("/")[0] in _OTHER_ENDPOINTS):
        return TransportRefused(
            "endpoint_not_supported", f"This server does not offer {method} {_plain(asked)}."
        )
    return TransportRefused("not_found", f"There is no {method} {_plain(asked)} here.")


def _plain(path: str) -> str:
    """As JSON text without its quotes: control characters are escaped (O6)."""
    return shown(path)[1:-1]


def _wrong_method(path: str, method: str, allowed: set[str]) -> TransportRefused:
    names = sorted(allowed | ({"HEAD"} if "GET" in allowed else set()))
    return TransportRefused(
        "method_not_allowed",
        f"{method[:20]} is not possible on {_plain(path)}; use {' or '.join(names)}.",
        headers={"allow": ", ".join(names)},
    )
