"""What crosses between server and worker: frozen msgspec records, one tagged union a direction.

Two channels join the processes, each a ZeroMQ pair over a private socket:

    work     server -> worker   Generate, Abort, Pause, Resume   (`Command`)
             worker -> server   tuple of Event   (all events of one step in one frame)
    control  server -> worker   Ping, Inject, Stop                  (`Control`)
             worker -> server   Loading, Loaded, Ready, LoadFailed,
                                Latched, Pong                       (`Notice`)

The control channel is answered by a thread of its own in the worker; a `Pong` carries when the
loop last made progress, so that a thread that answers never vouches for a loop that hangs.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

RequestId = NewType("RequestId", str)
FinishReason = Literal["stop", "length"]


class PatchSpec(msgspec.Struct, frozen=True):
    """How a family cuts pictures; read from the checkpoint's preprocessor config by the worker.

    Units: patch and merge in pixels and patches; tokens are merged patches (one prompt row each).
    """

    family: str
    patch: int
    merge: int
    temporal: int
    min_tokens: int
    max_tokens: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float = 1.0 / 255.0


class Picture(msgspec.Struct, frozen=True):
    """One picture, cut into patches but not yet normalised.

    Shapes: patches is (rows, channels * patch * patch) uint8, C order, in merge-block order;
            grid counts patches as (temporal, height, width); merge*merge patches make one
            prompt row.
    """

    patches: bytes
    grid: tuple[int, int, int]
    position: int  # prompt index of its first placeholder
    tokens: int  # placeholders it covers: grid height * width / merge^2
    digest: str  # sha256 hex over patches and all that shapes them (O59)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn: a function of (seed, choice, position) and nothing else (O30)."""

    temperature: float = 0.0  # below 1e-3 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # signed 64 bit; the server always fills it in


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One admitted request, complete: replayed as it is with `emitted` filled in."""

    request: RequestId
    prompt: tuple[int, ...]  # token ids, placeholders already repeated once per image row
    pictures: tuple[Picture, ...] = ()
    sampling: Sampling = Sampling()
    max_tokens: int  # bound on generated tokens, at least 1; prompt + max_tokens <= context
    min_tokens: int = 0  # stop ids are masked until so many were generated
    stop_ids: tuple[int, ...] = ()  # end-of-sequence ids (unless ignored) and stop_token_ids
    cache_salt: str = ""  # computed rows are shared with requests of the same salt only (O25)
    emitted: tuple[int, ...] = ()  # tokens already sent to the client (replay after a fault)
    choice: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client left, or the server saw a stop string: end this request and give all back."""

    request: RequestId


class Pause(msgspec.Struct, frozen=True, tag=True):
    """The client reads too slowly (O85): plan nothing for this request until `Resume`."""

    request: RequestId


class Resume(msgspec.Struct, frozen=True, tag=True):
    """The client caught up: plan for this request again."""

    request: RequestId


Command = Generate | Abort | Pause | Resume


class Token(msgspec.Struct, frozen=True, tag=True):
    """One generated token; the end-of-sequence token is sent too, right before `Finished`."""

    request: RequestId
    id: int
    logprob: float | None = None
    cached_tokens: int = 0  # of the prompt; told with a request's first token, 0 with all others


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The request ended by itself. `stop_id` is the id that stopped it, or None for `length`."""

    request: RequestId
    reason: FinishReason
    stop_id: int | None = None
    queue_s: float = 0.0  # waited for a slot
    prefill_s: float = 0.0  # from the slot to the first token
    cached_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request ended with an error; `code` is of O8: internal_error, overloaded, ..."""

    request: RequestId
    code: str
    message: str


Event = Token | Finished | Failed


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Are you there, and when did you last make progress?"""

    n: int


class Inject(msgspec.Struct, frozen=True, tag=True):
    """A fault on order (rule 120); obeyed only with `--fault-injection on`, once each.

    `where` says when it strikes: at the next call of that kind (`step`, `tower`, `idle`, `alloc`).
    """

    fault: Literal["sticky", "returned", "isolated", "hang", "kill", "nan_image", "out_of_memory"]
    where: Literal["step", "tower", "idle", "alloc", "now"] = "step"
    stage: int = 0
    code: int = 700
    seconds: float = 3600.0  # how long a hang lasts


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End cleanly: give everything back and exit 0."""


Control = Ping | Inject | Stop


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of a load: phase `weights` or `warming`; bytes are of the weights."""

    phase: Literal["weights", "warming"]
    bytes_done: int = 0
    bytes_total: int = 0


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What this worker can do, known once the weights are in; the HTTP side asks nobody else."""

    family: str
    context: int  # C: prompt + generated tokens of one sequence, at most (R1, R71)
    max_sequences: int
    pool_tokens: int  # token rows that all sequences share
    vocab: int  # ids that may be sampled or sent: [0, vocab)
    end_ids: tuple[int, ...]
    patches: PatchSpec | None  # None: no pictures
    pictures_off: str | None = None  # why a model that sees takes no pictures here (rule 15)
    image_token: int | None
    vision_ids: tuple[int, ...] = ()  # every id that may only come from an image part
    devices: tuple[str, ...] = ()
    weight_bytes: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The self-test produced a token on every stage."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The load ended; `exit_code` is 1 for a bad model, 2 for a setting. One line for people."""

    message: str
    exit_code: int


class Fault(msgspec.Struct, frozen=True):
    """Why a worker is lost (R78): the first writer's words, never changed."""

    reason: str
    code: int
    call: str
    device: str
    stage: int


class Latched(msgspec.Struct, frozen=True, tag=True):
    """The latch is set: sent at once, unasked."""

    fault: Fault


class StageReport(msgspec.Struct, frozen=True):
    """One stage as `/health` shows it; ages in seconds."""

    stage: int
    device: str
    state: Literal["ok", "faulted"]
    last_result_age_s: float
    canary_age_s: float
    waiting_s: float  # in the device call going on; 0 when in none


class Carried(msgspec.Struct, frozen=True):
    """How rows go from stage to stage (rules 68, 72); nothing is carried with one stage."""

    route: str | None = None  # local, peer, host; several with commas between them
    integrity: Literal["ok"] | None = None  # what failed its probe carries nothing


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker as its control thread sees it; ages in seconds, counts in requests or units."""

    n: int
    fault: Fault | None
    heartbeat_age_s: float
    progress_age_s: float  # last host-visible progress: a step's result, or an idle canary
    device_wait_s: float  # the longest of the stages
    tick_max_s: float
    running: int
    waiting: int
    pages_free: int
    pages_total: int
    slots_free: int
    slots_total: int
    allocations: int
    allocated_bytes: int
    stages: tuple[StageReport, ...]
    transport: Carried = Carried()
    counters: dict[str, float] = {}  # monotonic counters by metric name (engine/metrics of R102)


Notice = Loading | Loaded | Ready | LoadFailed | Latched | Pong
