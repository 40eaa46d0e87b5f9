"""Errors a user can act on. Each is one line that names the cause and the knob."""


class DFlashError(Exception):
    """Base of every error that the command line prints as one line instead of a traceback."""


class CheckpointError(DFlashError):
    """A checkpoint that cannot be read, or contradicts its configuration."""


class PairError(DFlashError):
    """A target and a drafter that do not belong together."""


class SettingsError(DFlashError):
    """A setting that is wrong in itself, or contradicts the checkpoint or the engine."""


class EngineError(DFlashError):
    """An engine directory that cannot be built, loaded or run."""


class ReplyError(EngineError):
    """A reply that cannot be made, where the engine computes as it should: a fault of its text or its grammar, say."""


class RequestError(DFlashError):
    """A request that this engine cannot serve.

    Args:
        reason: one line.
        field: the part of the request that is at fault, by its name in `Service.submit` or `SamplingParams`; interfaces
            that call it otherwise put their own name before the reason.
    """

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason if field is None else f"{field}: {reason}")
        self.reason = reason
        self.field = field


class LongPromptError(RequestError):
    """A prompt with more tokens than the engine takes."""


class QueueFullError(RequestError):
    """The queue of requests is full: try again later, or elsewhere."""


class ShutdownError(RequestError):
    """The server is ending: it takes no more requests, and ends those that take too long."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"shutdown: {reason}")


class DeadlineError(RequestError):
    """A request's deadline passed before its last token."""


class CancelledError(RequestError):
    """A request that its client no longer wants."""


def one_line(error: Exception) -> str:
    """Writes what a library's error says on one line."""
    return " ".join(str(error).split())


def first_line(error: Exception) -> str:
    """Takes the first line of what a library's error says; its type's name where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def why_unreadable(error: Exception) -> str:
    """Writes why a file cannot be read, without the path, which the message has, and numbers."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8, from byte {error.start} on"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"cannot be read: {reason or one_line(error)}"
