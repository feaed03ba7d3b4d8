"""A rule that tells whether an exception looks like the end of a peer: a consequence of a failure elsewhere."""

from __future__ import annotations

_KINDS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError"}
_WORDS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "gloo",
    "nccl",
    "timed out waiting",
    "socket timeout",
    "remote process exited",
    "process group",
    "processgroup",
    "tcpstore",
    "watchdog",
)
_MOST = 16  # longest chain of exceptions to inspect


def is_communication_error(error: BaseException | None) -> bool:
    """Return whether an exception, or an exception that caused it, looks like the end of a peer."""
    seen = 0
    while error is not None and seen < _MOST:
        kinds = {cls.__name__ for cls in type(error).__mro__}
        if kinds & _KINDS:
            return True
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS):
            return True
        error = error.__cause__ or error.__context__
        seen += 1
    return False
