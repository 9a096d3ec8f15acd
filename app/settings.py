"""Every setting in one table: name, legal values, default, meaning; flags and docs come from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PREFIX = "STAGELIGHT_"  # of environment names: `--max-context` is STAGELIGHT_MAX_CONTEXT


@dataclass(frozen=True, slots=True)
class Kind:
    """How a text becomes a value; `parse` raises `ValueError` for anything but `legal`.

    Flags, environment and file share this one grammar: a number of the file is read as its text.
    """

    parse: Callable[[str], Any]
    legal: str
    metavar: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. An empty default means "not set", and `otherwise` says what then holds."""

    name: str  # as the flag without its dashes
    kind: Kind
    default: str
    meaning: str
    otherwise: str = ""
    is_flag: bool = True  # False: a key of the file and an environment name only

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace("-", "_").upper()

    @property
    def shown_default(self) -> str:
        return self.default or self.otherwise


def whole(low: int, high: int | None = None) -> Kind:
    """A whole number from `low` to `high`, both legal."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    span = f"of {low} or more" if high is None else f"from {low} to {high}"
    return Kind(parse, f"a whole number {span}", "N")


def seconds(low: float, high: float) -> Kind:
    """A number of seconds from `low` to `high`, both legal."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:  # also refuses nan
            raise ValueError(text)
        return value

    return Kind(parse, f"seconds from {low:g} to {high:g}", "SECONDS")


def choice(*values: str) -> Kind:
    """One of a few words, in any letter case, blanks around it ignored."""

    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in values:
            raise ValueError(text)
        return value

    return Kind(parse, f"{', '.join(values[:-1])} or {values[-1]}", "|".join(values))


def a_list_of(kind: Kind, legal: str, metavar: str) -> Kind:
    """Values of one kind with commas between them."""

    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind.parse(part.strip()) for part in text.split(","))

    return Kind(parse, legal, metavar)


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[text.strip().lower()]


def _words(text: str) -> str:
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError(text)
    return text


def _root_path(text: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", text):
        raise ValueError(text)
    return text


def _device(text: str) -> str:
    """`cpu` is `cpu:0`, and so on: inside, a device always carries its ordinal."""
    kind, colon, ordinal = text.strip().lower().partition(":")
    if kind not in ("cpu", "cuda") or (colon and not ordinal.isdecimal()):
        raise ValueError(text)
    return f"{kind}:{int(ordinal or 0)}"


def _off_or_count(text: str) -> int:
    return 0 if text.strip().lower() == "off" else whole(1, 8).parse(text)


SWITCH = Kind(_switch, "on or off", "on|off")
TEXT = Kind(_words, "a text without blanks at its ends", "TEXT")
FILE = Kind(_words, "the path of a file", "FILE")
PATH = Kind(_root_path, "a path such as /llm, without a slash at its end", "/PATH")
NAMES = a_list_of(TEXT, "names with commas between them", "NAME,...")
DEVICES = a_list_of(
    Kind(_device, "", ""), "cpu, or devices such as cpu:0,cpu:1 or cuda:0,cuda:1", "DEVICE,..."
)
FENCE = a_list_of(whole(0), "rising layer numbers from 0 to the number of layers", "0,N,...")
DELAYS = a_list_of(
    seconds(0, 600), "seconds from 0 to 600, with commas between them", "SECONDS,..."
)
SPECULATE = Kind(_off_or_count, "off, or a number of drafts from 1 to 8", "off|N")
HOSTS = a_list_of(TEXT, "none, or host names with commas between them", "none|HOST,...")

_DAY_S = 86_400.0


def _key(name: str, kind: Kind, default: str, meaning: str, otherwise: str = "") -> Setting:
    return Setting(name, kind, default, meaning, otherwise, is_flag=False)


SETTINGS: tuple[Setting, ...] = (
    Setting("host", TEXT, "", "Address to listen on.", "127.0.0.1; 0.0.0.0 when a key is set"),
    Setting("port", whole(0, 65_535), "8000", "Port to listen on; 0 takes a free one."),
    Setting(
        "served-model-name", TEXT, "", "Name that clients send in `model`.", "last part of MODEL"
    ),
    Setting("devices", DEVICES, "cpu", "Devices that hold the model, in stage order."),
    Setting("stages", whole(1), "", "Pipeline stages.", "the number of devices"),
    Setting("fence", FENCE, "", "Layers at which the stages are cut.", "even cuts"),
    Setting(
        "max-context",
        whole(1),
        "",
        "Tokens of one sequence, prompt and answer together.",
        "the checkpoint's, lowered to what fits",
    ),
    Setting("max-sequences", whole(1, 4_096), "64", "Sequences that run at the same time."),
    Setting(
        "step-tokens",
        whole(16, 65_536),
        "1024",
        "Tokens of one step, prompts and answers together.",
    ),
    Setting("dtype", choice("auto", "float32", "bfloat16"), "auto", "Number type of the weights."),
    Setting("load-format", choice("auto", "dummy"), "auto", "Where the weights come from."),
    Setting(
        "overlay-publish",
        choice("auto", "force", "off"),
        "auto",
        "When picture rows are copied to the device of stage 0.",
    ),
    Setting(
        "transport", choice("auto", "peer", "host"), "auto", "How rows go from stage to stage."
    ),
    Setting("speculate", SPECULATE, "off", "Tokens drafted in each step."),
    Setting("prefix-cache", SWITCH, "on", "Keep the rows of prompt beginnings for later requests."),
    Setting("supervise", SWITCH, "on", "Replace a worker process that died, hangs or is faulted."),
    Setting(
        "deterministic",
        SWITCH,
        "off",
        "Give each sum of a row one order: the same bits whatever the batch and the chunks.",
    ),
    Setting(
        "api-key-file", FILE, "", "File with one key a line, `name:key` or `key`.", "no key needed"
    ),
    Setting("image-hosts", HOSTS, "none", "Hosts that pictures may be fetched from."),
    Setting("log-format", choice("text", "json"), "text", "Form of the log lines."),
    Setting("drain-s", seconds(0, 3_600), "30", "Longest wait for running requests at the end."),
    Setting("fault-injection", SWITCH, "off", "Obey orders to fail; for tests only."),
    _key("queue-limit", whole(0), "256", "Requests that may wait for a place."),
    _key("queue-timeout-s", seconds(0.1, _DAY_S), "60", "Longest wait for a place."),
    _key("model-aliases", NAMES, "", "Further names that clients may send in `model`.", "none"),
    _key("root-path", PATH, "", "Where every path but the health ones begins.", "none"),
    _key(
        "unversioned-paths", SWITCH, "off", "Take chat, completions and models without /v1 as well."
    ),
    _key(
        "reasoning-field",
        choice("reasoning_content", "reasoning", "both", "none"),
        "reasoning_content",
        "Where an answer tells the thinking; none leaves it out.",
    ),
    _key(
        "sampling-defaults",
        choice("checkpoint", "openai"),
        "checkpoint",
        "Whose defaults hold where a request says nothing.",
    ),
    _key("lenient-history", SWITCH, "off", "Take tool results and calls that do not match."),
    _key("clamp", SWITCH, "off", "Cut `max_tokens` to the room left instead of refusing."),
    _key("metrics-open", SWITCH, "off", "Answer `/metrics` without a key."),
    _key("max-body-bytes", whole(1), "67108864", "Largest request body."),
    _key("max-body-values", whole(1), "200000", "JSON values of one request body above 64 KiB."),
    _key("body-timeout-s", seconds(0.1, _DAY_S), "60", "Longest time that a body may take."),
    _key("max-images", whole(0), "16", "Pictures of one request."),
    _key("max-image-bytes", whole(1), "20971520", "Largest picture file."),
    _key("max-image-pixels", whole(1), "89478485", "Most pixels of one picture."),
    _key("max-image-aspect", whole(1), "200", "Most times that one side is longer than the other."),
    _key("max-stop-strings", whole(1, 16), "4", "Stop strings of one request."),
    _key("max-messages", whole(1), "4096", "Messages of one request."),
    _key("decode-workers", whole(1), "", "Threads that decode pictures.", "half the cores"),
    _key(
        "keep-alive-s",
        seconds(0, _DAY_S),
        "15",
        "Silence of a stream before a comment line; 0 sends none.",
    ),
    _key("idle-connection-s", seconds(1, _DAY_S), "75", "Idle time between two requests."),
    _key("silent-connection-s", seconds(0.1, _DAY_S), "30", "Longest wait for a request's head."),
    _key("slow-reader-s", seconds(0.1, _DAY_S), "60", "Longest wait for a client to read on."),
    _key("page-tokens", whole(16), "64", "Tokens of one cache page; a multiple of 16."),
    _key("memory-bytes", whole(1), "", "Memory for caches.", "a share of what is free"),
    _key(
        "prefix-cache-bytes",
        whole(1),
        "",
        "Memory for kept prompt beginnings, of that for caches.",
        "64 of 1,024 tokens; a quarter at most",
    ),
    _key("encoder-cache-bytes", whole(0), "33554432", "Memory for kept picture rows; 0: none."),
    _key("blas-threads", whole(1, 256), "1", "Threads of one matrix product."),
    _key("canary-period-s", seconds(0.1, 3_600), "5", "Time between idle checks of each stage."),
    _key("beat-period-s", seconds(0.05, 60), "1", "Longest sleep of an idle loop."),
    _key("ping-period-s", seconds(0.02, 60), "0.2", "Time between pings to the worker."),
    _key("stall-soft-s", seconds(0.1, _DAY_S), "30", "Time without progress: stalled."),
    _key("stall-hard-s", seconds(0.2, _DAY_S), "120", "Time without progress: hung."),
    _key("restart-budget", whole(0), "3", "Worker deaths in the window that are mended."),
    _key("restart-window-s", seconds(1, _DAY_S), "600", "The window of the restart budget."),
    _key("restart-delays-s", DELAYS, "0,1,5", "Waits before the first, second, ... new worker."),
    _key("stay-in-load-failed", SWITCH, "off", "Answer 503 after a failed load instead of ending."),
)

BY_NAME = {setting.name: setting for setting in SETTINGS}
FLAGS = tuple(setting for setting in SETTINGS if setting.is_flag)
