"""The few calls of NCCL's C interface that we need. Called on one GPU so far (`benchmarks.gpu`).

torch's own process groups would put our operations under torch's watchdog, which ends the process when one fails.
They would also create a communicator for each pair of ranks. The library is the one that torch has loaded, so that
both agree on its version. An NCCL that torch links statically cannot be called from here.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from pathlib import Path

from gemini_hpc.train.device.interface import Broken

ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
LEAST_VERSION = 21800  # non-blocking communicators with all fields of `NcclConfig`
_NAME = "libnccl.so.2"
_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(1 << 31)


class UniqueId(ctypes.Structure):
    """The id of a communicator to be made: 128 bytes that rank 0 creates and sends to all others."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class NcclConfig(ctypes.Structure):
    """The `ncclConfig_t` of NCCL 2.18; newer libraries read it by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    )


def build_config(most_ctas: int) -> NcclConfig:
    """Return a configuration for calls that return at once and kernels of at most `most_ctas` blocks.

    The limit bounds the SMs that are taken from the training.
    """
    return NcclConfig(
        size=ctypes.sizeof(NcclConfig),
        magic=_MAGIC,
        version=LEAST_VERSION,
        blocking=0,
        cgaClusterSize=_UNDEFINED,
        minCTAs=_UNDEFINED,
        maxCTAs=most_ctas,
        netName=None,
        splitShare=_UNDEFINED,
    )


class NcclUnavailable(Exception):
    """The error for a missing or unusable NCCL, with the reason."""


def _list_mapped() -> list[str]:
    """Return the paths of the NCCL libraries that the process has loaded."""
    found = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if os.path.basename(path).startswith("libnccl.so"):
                found.add(path)
    return sorted(found)


def list_candidates() -> list[str]:
    """Return the paths to try, best first: the loaded library, then torch's wheels, then the system's."""
    paths = _list_mapped()
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        package = None
    for place in (package.submodule_search_locations or []) if package is not None else []:
        paths.append(str(Path(place) / "lib" / _NAME))
    system = ctypes.util.find_library("nccl")
    return [*paths, *([system] if system else []), _NAME]


class Library:
    """The functions of NCCL, with their types."""

    def __init__(self, paths: list[str] | None = None) -> None:
        """Load NCCL from the first of `paths` (None: `list_candidates`) that can be loaded.

        Raises:
            NcclUnavailable: If none can be loaded, or the version is too old.
        """
        reasons = []
        self._dll: ctypes.CDLL | None = None
        for path in list_candidates() if paths is None else paths:
            try:
                self._dll = ctypes.CDLL(path)
                break
            except OSError as error:
                reasons.append(str(error))
        if self._dll is None:
            raise NcclUnavailable(f"NCCL cannot be loaded: {'; '.join(reasons)}")
        pointer, number, handle = ctypes.POINTER, ctypes.c_int, ctypes.c_void_p
        try:
            self._declare("ncclGetVersion", pointer(number))
            self._declare("ncclGetUniqueId", pointer(UniqueId))
            self._declare("ncclCommInitRankConfig", pointer(handle), number, UniqueId, number, pointer(NcclConfig))
            self._declare("ncclCommGetAsyncError", handle, pointer(number))
            self._declare("ncclCommAbort", handle)
            self._declare("ncclGroupStart")
            self._declare("ncclGroupEnd")
            for name in ("ncclSend", "ncclRecv"):
                self._declare(name, handle, ctypes.c_size_t, number, number, handle, handle)
            self._dll.ncclGetErrorString.argtypes = (number,)
            self._dll.ncclGetErrorString.restype = ctypes.c_char_p
        except AttributeError as error:
            raise NcclUnavailable(f"this NCCL is too old: {error}") from None
        found = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(found))
        self.version = found.value
        if self.version < LEAST_VERSION:
            raise NcclUnavailable(f"this NCCL has version {self.version}, at least {LEAST_VERSION} is needed")

    def _declare(self, name: str, *types: type) -> None:
        function = getattr(self._dll, name)
        function.argtypes, function.restype = types, ctypes.c_int

    def call(self, name: str, *args: object) -> int:
        """Call a function. Return SUCCESS or IN_PROGRESS.

        Raises:
            Broken: For any other result.
        """
        result = int(getattr(self._dll, name)(*args))
        if result not in (SUCCESS, IN_PROGRESS):
            raise Broken(f"{name}: {self.describe(result)}")
        return result

    def describe(self, result: int) -> str:
        """Return NCCL's own text for a result."""
        assert self._dll is not None
        text = self._dll.ncclGetErrorString(result)
        return text.decode(errors="replace") if text else f"result {result}"

    def create_unique_id(self) -> bytes:
        """Return a new communicator id; called on one rank, which sends it to the others.

        Raises:
            Broken: If the call fails.
        """
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return ctypes.string_at(ctypes.byref(made), ID_BYTES)
