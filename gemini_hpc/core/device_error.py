"""A rule that tells errors of an accelerator, or of its bus, from errors of the program that uses it."""

from __future__ import annotations

_KIND = "AcceleratorError"  # torch >= 2.8; earlier releases raise a RuntimeError with one of these words
_WORDS = ("cuda error", "hip error", "cublas_status_execution_failed", "cublas_status_internal_error")
# Errors that a program causes on a healthy device.
_OF_THE_PROGRAM = (
    "out of memory",
    "device-side assert",
    "invalid device ordinal",
    "invalid argument",
    "invalid configuration",
    "no kernel image",
    "driver version is insufficient",
    "all cuda-capable devices are busy",
    "operation not permitted",
    "initialization error",  # CUDA in a forked process
)


def is_device_error(error: BaseException | None) -> bool:
    """Return whether the exception is the accelerator's own: another device might not have raised it."""
    if error is None:
        return False
    text = str(error).lower()
    is_named = any(cls.__name__ == _KIND for cls in type(error).__mro__)
    if not is_named and not (isinstance(error, RuntimeError) and any(word in text for word in _WORDS)):
        return False
    return not any(word in text for word in _OF_THE_PROGRAM)
