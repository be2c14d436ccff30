"""The one exception of the engine.

``EngineError`` *is* the class that the native module raises: there is nothing to translate and no second
type to catch. Python code raises it through :func:`fail`, with the same codes and the same manner of
message as the C++ side: one sentence that names the file, tensor or field and what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn, cast

ErrorCode = Literal[
    "invalid_argument",  # the caller's value is out of range, or two values contradict each other
    "bad_file",  # a file that fails a check
    "bad_model",  # a tensor or config field that is missing, unknown, or of the wrong shape or dtype
    "unsupported",  # well-formed, but this build, backend or device cannot do it
    "out_of_memory",  # memory, KV pages or context: the message has the numbers
    "not_finite",  # NaN or infinity where the result would depend on it
    "io",  # the operating system said no
    "internal",  # a bug of ours
]

if TYPE_CHECKING:

    class EngineError(RuntimeError):
        """Whatever goes wrong in the engine: ``str(error)`` is one sentence, ``error.code`` an ErrorCode."""

        code: ErrorCode

else:
    from ._native import Error as EngineError

__all__ = ["EngineError", "ErrorCode", "fail"]


def fail(code: ErrorCode | str, message: str, cause: BaseException | None = None) -> NoReturn:
    """Raise EngineError with `code`; `message` is one sentence without a final full stop."""
    error = EngineError(message)
    error.code = cast("ErrorCode", code)
    raise error from cause
