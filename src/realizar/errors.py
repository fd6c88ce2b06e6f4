"""All errors that a user of realizar can get. Standard library only."""

from __future__ import annotations

import os


class RealizarError(Exception):
    """Base of all errors raised on purpose. The message is one line, written for the user."""


class CheckpointError(RealizarError):
    """A malformed checkpoint file.

    `where` is the place in it: `offset 24`, `tensor 'blk.0.attn_q.weight'`, `key 'general.alignment'`.
    """

    def __init__(self, path: str | os.PathLike[str], where: str, reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {where}: {reason}")
        self.path, self.where, self.reason = path, where, reason


class UnsupportedModelError(RealizarError):
    """A well-formed checkpoint that can't run here: unknown architecture, no weights, unknown key value."""


class TokenizerError(RealizarError):
    """A vocabulary is missing, or can't be reproduced exactly."""


class ChatTemplateError(RealizarError):
    """A chat template that is missing, fails, is refused, or exceeds its bounds of time and memory."""


class InvalidRequestError(RealizarError):
    """A request whose field is out of range. `param` is the name of the field at fault, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and requested output together, exceed the context.

    Clients know it by words of the message, and then drop what is old, or ask a model with a longer context: "this
    model's maximum context length is", and "prompt is too long" where the prompt alone is.
    """


class HubError(RealizarError):
    """A model is not found, not readable, or its bytes are not the expected ones."""


class UnknownModelError(HubError):
    """No model can have the name, none has it, or several do: to try again does not help."""


class CapacityError(RealizarError):
    """Weights, KV cache or workspace do not fit into memory."""


class StepMemoryError(CapacityError):
    """A step of the engine did not fit into the device's memory: its requests ended, and others may run."""


class KernelError(RealizarError):
    """A device kernel that can't be compiled, loaded or launched; `kernel` names the source of one in CUDA C++."""

    def __init__(self, message: str, kernel: str | None = None) -> None:
        super().__init__(message)
        self.kernel = kernel


class StepError(RealizarError):
    """A kernel failed in a step: the step's requests ended, and others may run."""


class DeviceLostError(RealizarError):
    """The device's context is unusable: a new process is needed."""


class CaptureLostError(DeviceLostError):
    """The device's context was lost while graphs were captured: a new process can go without them."""


class RequestFailedError(RealizarError):
    """The model's numbers, a kernel or the program failed on one request, through no fault of it; others go on."""


class EngineDeadError(RealizarError):
    """The engine stopped while, or before, a request was open."""


class EngineUnavailableError(EngineDeadError):
    """The engine takes no requests now: it is starting, restarting after a crash, or draining; see `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(RealizarError):
    """The queue is full. `retry_after_s`: seconds after which to try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
