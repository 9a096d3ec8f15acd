"""The one reader of flags, environment and file; it returns frozen records.

Precedence: flag, then `STAGELIGHT_<NAME>`, then the TOML file of `--config`, then the default.
Everything is read once, before the port is bound, and never again. An empty text is the same as
none, because that is how many tools spell "not set".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from app.settings import BY_NAME, PREFIX, SETTINGS, Setting
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError

DEFAULT_MODEL = "glimmer"
BUILT_IN = {DEFAULT_MODEL: Path(__file__).parent / "models" / "glimmer"}

# A cluster whose service is called `stagelight` sets these for every pod; they are no settings.
_SERVICE_LINK = re.compile(r"STAGELIGHT_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One accepted key; the log shows `name`: the given one, or 4 characters of its hash."""

    name: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may hold; sizes in bytes, times in seconds (O12, O39, O50)."""

    body_bytes: int = 64 * 1024 * 1024
    body_values: int = 200_000  # JSON values of a body
    body_timeout_s: float = 60.0
    images: int = 16
    image_bytes: int = 20 * 1024 * 1024
    pixels: int = 89_478_485
    aspect: int = 200
    stop_strings: int = 4
    messages: int = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that the server process needs to know, resolved and checked."""

    model: str  # as given
    model_folder: Path
    served_model_name: str
    host: str
    port: int
    engine: EngineConfig
    supervise: bool = True
    drain_s: float = 30.0
    log_format: Literal["text", "json"] = "text"
    api_key_file: Path | None = None
    api_keys: tuple[ApiKey, ...] = ()
    fault_injection: bool = False
    limits: Limits = Limits()
    model_aliases: tuple[str, ...] = ()
    root_path: str = ""  # `/llm`: before every path but the health ones (O4)
    unversioned_paths: bool = False
    reasoning_field: Literal["reasoning_content", "reasoning", "both", "none"] = "reasoning_content"
    sampling_defaults: Literal["checkpoint", "openai"] = "checkpoint"
    lenient_history: bool = False
    clamp: bool = False
    metrics_open: bool = False
    stall_soft_s: float = 30.0
    stall_hard_s: float = 120.0
    restart_budget: int = 3
    restart_window_s: float = 600.0
    restart_delays_s: tuple[float, ...] = (0.0, 1.0, 5.0)
    ping_period_s: float = 0.2
    stay_in_load_failed: bool = False
    keep_alive_s: float = 15.0  # of streams (O79); 0 sends no comments
    idle_connection_s: float = 75.0  # O19
    silent_connection_s: float = 30.0  # O19
    slow_reader_s: float = 60.0  # O85
    decode_workers: int = 1

    def __post_init__(self) -> None:
        if self.stall_soft_s >= self.stall_hard_s:
            raise ConfigError(
                f"stall-soft-s is {self.stall_soft_s:g} and stall-hard-s {self.stall_hard_s:g}; "
                "the soft limit has to come first."
            )

    @property
    def served_names(self) -> tuple[str, ...]:
        """What `model` of a request may be, the main name first (O24)."""
        return tuple(dict.fromkeys((self.served_model_name, *self.model_aliases)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the boot says in one line each: choices that somebody might not have meant."""
        lines = []
        if not self.api_keys and self.host not in ("127.0.0.1", "::1", "localhost"):
            lines.append(
                f"listening on {self.host} without a key: everybody who reaches this address can "
                "use the model; give --api-key-file, or --host 127.0.0.1."
            )
        if self.fault_injection:
            lines.append("fault injection is on: this server obeys orders to fail.")
        return tuple(lines)


class Given(NamedTuple):
    """A text that somebody set, and where: `--port`, `STAGELIGHT_PORT`, or a key of the file."""

    text: str
    where: str


class NotYet(NamedTuple):
    """A legal value whose part is not built: asked for, it ends the boot and is never ignored."""

    setting: str
    is_asked: Callable[[Any], bool]
    what: str
    mend: str


NOT_YET: tuple[NotYet, ...] = (
    NotYet("devices", lambda v: any(d.startswith("cuda") for d in v), "the CUDA backend", "cpu"),
    NotYet("dtype", lambda v: v == "bfloat16", "bfloat16 on the CPU", "float32 or auto"),
    NotYet("load-format", lambda v: v == "dummy", "made-up weights", "auto"),
    NotYet("speculate", lambda v: v != 0, "speculation", "off"),
    NotYet("image-hosts", lambda v: v != ("none",), "pictures by URL", "none and send data URLs"),
)


def load_settings(
    model: str | None = None,
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Read every source, once, and resolve what depends on the machine or on another setting.

    Args:
        model: the MODEL argument; else `STAGELIGHT_MODEL`, else `model` of the file, else glimmer.
        flags: texts by flag name without dashes (`max-context`, `config`); None is unset.
        environ: the environment; this process's own when left out.

    Raises:
        ConfigError: an unknown name, an illegal value, or one whose part is not built (exit 2).
        ModelError: MODEL is no folder with a checkpoint (exit 1).
    """
    nearer = {
        **_from_environment(os.environ if environ is None else environ),
        **{name: Given(text, f"--{name}") for name, text in (flags or {}).items() if text},
    }
    file = nearer.pop("config", None)
    given = {**(_from_file(file) if file else {}), **nearer}
    chosen = model or given.pop("model", Given(DEFAULT_MODEL, "")).text
    given.pop("model", None)
    for name, value in given.items():
        if name not in BY_NAME:
            raise ConfigError(f"{value.where} is no setting; {_nearest(name)}.")
    values = {setting.name: _value(setting, given.get(setting.name)) for setting in SETTINGS}
    if values["stages"] is None:
        values["stages"] = len(values["devices"])
    _refuse_what_is_not_built(values, given)
    _one_device_a_stage(values["stages"], values["devices"])
    return _resolve(chosen, values)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    found = {}
    for variable, text in environ.items():
        if not text or not variable.startswith(PREFIX) or _SERVICE_LINK.fullmatch(variable):
            continue
        if variable == "STAGELIGHT_PORT" and _SERVICE_URL.match(text):
            continue
        found[variable.removeprefix(PREFIX).lower().replace("_", "-")] = Given(text, variable)
    return found


def _from_file(file: Given) -> dict[str, Given]:
    import tomllib  # only who has a file pays for it: the worker starts sooner

    path = Path(file.text)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file.where} {path}: {error.strerror}; name a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.where} {path} is not TOML: {error}.") from error
    found = {}
    for key, value in table.items():
        if isinstance(value, dict):
            raise ConfigError(f"[{key}] in {path}: the settings stand at the top, not in tables.")
        found[key.replace("_", "-")] = Given(_text(value), f"{key} in {path}")
    return found


def _text(value: Any) -> str:
    """A TOML value as it would stand on the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(_text(part) for part in value)
    return str(value)


def _value(setting: Setting, given: Given | None) -> Any:
    if given is None and not setting.default:
        return None
    text, where = given or Given(setting.default, setting.name)
    try:
        return setting.kind.parse(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{where} is {text!r}; use {setting.kind.legal}.") from None


def _refuse_what_is_not_built(values: Mapping[str, Any], given: Mapping[str, Given]) -> None:
    for row in NOT_YET:
        if row.is_asked(values[row.setting]):
            text, where = given.get(row.setting, Given(str(values[row.setting]), row.setting))
            raise ConfigError(
                f"{where} {text} asks for {row.what}, which this version does not have; "
                f"use {row.mend}."
            )


def _nearest(name: str) -> str:
    from difflib import get_close_matches  # only a mistake pays for it

    close = get_close_matches(name, [*BY_NAME, "model", "config"], n=1, cutoff=0.5)
    return f"the nearest name is {close[0]}" if close else "docs/settings.md lists all"


def _resolve(model: str, values: dict[str, Any]) -> ServerConfig:
    folder = find_model(model)
    key_file = Path(values["api-key-file"]) if values["api-key-file"] else None
    keys = read_api_keys(key_file) if key_file else ()
    engine = EngineConfig(
        model=str(folder),
        devices=values["devices"],
        fence=_fence(values["fence"], values["stages"]),
        transport=values["transport"],
        overlay_publish=values["overlay-publish"],
        max_context=values["max-context"],
        max_sequences=values["max-sequences"],
        step_tokens=values["step-tokens"],
        page_tokens=values["page-tokens"],
        memory_bytes=values["memory-bytes"],
        prefix_cache=values["prefix-cache"],
        prefix_cache_bytes=values["prefix-cache-bytes"],
        encoder_cache_bytes=values["encoder-cache-bytes"],
        deterministic=values["deterministic"],
        queue_limit=values["queue-limit"],
        queue_timeout_s=values["queue-timeout-s"],
        canary_period_s=values["canary-period-s"],
        beat_period_s=values["beat-period-s"],
        blas_threads=values["blas-threads"],
        fault_injection=values["fault-injection"],
    )
    return ServerConfig(
        model=model,
        model_folder=folder,
        served_model_name=values["served-model-name"] or _last_part(model, folder),
        host=values["host"] or ("0.0.0.0" if keys else "127.0.0.1"),
        port=values["port"],
        engine=engine,
        supervise=values["supervise"],
        drain_s=values["drain-s"],
        log_format=values["log-format"],
        api_key_file=key_file,
        api_keys=keys,
        fault_injection=values["fault-injection"],
        limits=Limits(
            body_bytes=values["max-body-bytes"],
            body_values=values["max-body-values"],
            body_timeout_s=values["body-timeout-s"],
            images=values["max-images"],
            image_bytes=values["max-image-bytes"],
            pixels=values["max-image-pixels"],
            aspect=values["max-image-aspect"],
            stop_strings=values["max-stop-strings"],
            messages=values["max-messages"],
        ),
        model_aliases=values["model-aliases"] or (),
        root_path=values["root-path"] or "",
        unversioned_paths=values["unversioned-paths"],
        reasoning_field=values["reasoning-field"],
        sampling_defaults=values["sampling-defaults"],
        lenient_history=values["lenient-history"],
        clamp=values["clamp"],
        metrics_open=values["metrics-open"],
        stall_soft_s=values["stall-soft-s"],
        stall_hard_s=values["stall-hard-s"],
        restart_budget=values["restart-budget"],
        restart_window_s=values["restart-window-s"],
        restart_delays_s=values["restart-delays-s"],
        ping_period_s=values["ping-period-s"],
        stay_in_load_failed=values["stay-in-load-failed"],
        keep_alive_s=values["keep-alive-s"],
        idle_connection_s=values["idle-connection-s"],
        silent_connection_s=values["silent-connection-s"],
        slow_reader_s=values["slow-reader-s"],
        decode_workers=values["decode-workers"] or max(1, (os.cpu_count() or 2) // 2),
    )


def _one_device_a_stage(stages: int, devices: tuple[str, ...]) -> None:
    """A device may be named twice, but none is made up or left out (rule 49)."""
    if stages != len(devices):
        kind = devices[0].partition(":")[0]
        fitting = ",".join(f"{kind}:{ordinal}" for ordinal in range(min(stages, 8)))
        raise ConfigError(
            f"--stages is {stages} and --devices names {len(devices)} ({','.join(devices)}); use "
            f"--devices with one for each stage, e.g. {fitting}{',...' if stages > 8 else ''}."
        )


def _fence(cuts: tuple[int, ...] | None, stages: int) -> tuple[int, ...] | None:
    if cuts is None:
        return None
    rising = all(left < right for left, right in pairwise(cuts))
    if cuts[0] != 0 or not rising or len(cuts) != stages + 1:
        raise ConfigError(
            f"--fence {','.join(map(str, cuts))} does not cut {stages} stage(s); use "
            f"{stages + 1} rising layer numbers, the first 0 and the last the number of layers."
        )
    return cuts


def find_model(model: str) -> Path:
    """The folder that MODEL names: a built-in name, or a folder in Hugging Face layout.

    Raises:
        ConfigError: a form of MODEL that this version does not have.
        ModelError: there is no such folder, or it holds no checkpoint.
    """
    if model in BUILT_IN:
        return BUILT_IN[model]
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; name a folder in Hugging Face layout.")
        return path.resolve()
    if path.suffix == ".gguf":
        raise ConfigError(f"{model}: GGUF files are not in this version; name a folder.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not path.exists():
        raise ConfigError(
            f"{model} is no folder here, and this version does not fetch models from the hub; "
            "download it and name its folder."
        )
    raise ModelError(f"{model} is no folder; name one in Hugging Face layout, or {DEFAULT_MODEL}.")


def _last_part(model: str, folder: Path) -> str:
    return model if model in BUILT_IN else folder.name


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file, one a line: `name:key` or `key` (O15). Blank lines are left out.

    Raises:
        ConfigError: the file cannot be read, holds no key, or a line is no key. Names the line,
            never its text.
    """
    from hashlib import sha256  # only who sets keys pays for it

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}.") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, colon, value = line.strip().rpartition(":")
        if not re.fullmatch(r"[\x21-\x7e]+", value) or (colon and not name):
            raise ConfigError(
                f"line {number} of --api-key-file {path} is no key; write `name:key` or `key` in "
                "ASCII without blanks."
            )
        keys.append(ApiKey(name or sha256(value.encode()).hexdigest()[:4], value))
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one a line.")
    return tuple(keys)


# A step's buffers come and go. By default glibc maps each large one anew, page by page, and a
# prompt of 300 tokens takes 1.5x as long; these keep freed memory for the next step.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker: this process's, with the BLAS threads set before the import."""
    count = str(threads)
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    return {**ALLOCATOR, **os.environ, **_our_path(), **dict.fromkeys(names, count)}


def plain_environment() -> dict[str, str]:
    """This process's environment without our settings, for a server that a command starts."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    return {**kept, **_our_path()}


def _our_path() -> dict[str, str]:
    """Where a new interpreter finds this package first, whatever its working directory holds."""
    root, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
