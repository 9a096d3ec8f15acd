"""The tree of errors, drawn here; each names the thing, the numbers and the mend.

ServerError                 anything we raise on purpose
├── ConfigError             a setting or machine that cannot work        exit 2
│   └── ConfigRefused       a checkpoint's geometry that cannot work     exit 1 or 2
├── ModelError              a checkpoint that is broken or unknown       exit 1
├── RequestError            the client can mend it                       4xx
├── Overloaded              capacity; try again later                    503 overloaded
│   └── OutOfMemory         a device, pages or slots have no room
├── RequestFault            our fault, this request only                 500 internal_error
│   ├── CapacityExceeded    a row beyond the end of a cache
│   ├── RowsMissing         a cursor stands behind its sequence
│   ├── ForwardRewind       a rewind to a row that was never written
│   ├── StateReleased       a call on state that was given back
│   ├── NotResident         a buffer used in a context that cannot read it
│   ├── NotFinite           NaN or infinity where a token was to be drawn
│   └── ShapeMismatch       arrays that do not fit together
└── DeviceError             a device call failed; the judge decides what it means
    ├── ContextLost         a stage no longer answers                    503 gpu_fault
    ├── PeerLost            a stage thread or far stage ended
    └── EngineStalled       no progress                                  503 engine_stalled
"""

from __future__ import annotations


class ServerError(Exception):
    """Anything that this project raises on purpose; the message is a sentence for people."""


class ConfigError(ServerError):
    """A setting that this model or machine cannot have; ends the boot with code 2."""


class ConfigRefused(ConfigError):
    """A geometry that would give wrong answers instead of errors (R7); names the field."""


class ModelError(ServerError):
    """A checkpoint that cannot be served; ends the boot with code 1; names file and mend."""


class RequestError(ServerError):
    """Something the client can mend; `code` and `param` go into the error object (O5, O8)."""

    code: str = "invalid_value"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param


class Overloaded(ServerError):
    """No room now: queue, pages, slots or device memory. A later try can succeed."""


class OutOfMemory(Overloaded):
    """A pool or device has no room for what was asked; never a sign of a lost context (rule 89)."""


class RequestFault(ServerError):
    """Our fault, and this request's alone: it ends with 500 `internal_error`, others go on."""


class CapacityExceeded(RequestFault):
    """Rows beyond the end of a cache (R10 to R12); nothing was written."""


class RowsMissing(RequestFault):
    """A cursor stands behind its sequence (R14, R27); never repaired."""


class ForwardRewind(RequestFault):
    """A rewind to a row that was never written (R13)."""


class StateReleased(RequestFault):
    """A call on state that was given back (R59)."""


class NotResident(RequestFault):
    """A buffer that the consumer's context cannot read (rules 3 to 5); nothing was launched."""


class NotFinite(RequestFault):
    """NaN or infinity in a row of logits: no token is taken from it (O86)."""


class ShapeMismatch(RequestFault):
    """Arrays that do not fit together; names both shapes."""


class DeviceError(ServerError):
    """A device call failed. What it means is decided by the judge, by evidence (R76), never here.

    Args:
        call: name of the device call that failed, e.g. `kda` or `synchronize`.
        code: the driver's number, e.g. 700 for an illegal address; 0 when there is none.
        device: the device as on the command line, e.g. `cuda:1`.
    """

    def __init__(self, call: str, *, code: int, device: str, detail: str = "") -> None:
        super().__init__(
            f"{call} failed on {device} with code {code}{': ' if detail else ''}{detail}"
        )
        self.call = call
        self.code = code
        self.device = device


class ContextLost(DeviceError):
    """A stage no longer does real work (R76): only a new process can help."""


class PeerLost(DeviceError):
    """A stage thread or far stage ended (R88)."""


class EngineStalled(DeviceError):
    """No host-visible progress within a limit (R86)."""
