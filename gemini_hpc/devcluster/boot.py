"""Start of an init (`init.py`) in new namespaces, and the dialogue with it until it may live alone."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemini_hpc.devcluster import processes
from gemini_hpc.devcluster.errors import DevclusterError, read_log_tail
from gemini_hpc.devcluster.processes import ProcessId

Mount = list[str | int | bool]
_CREDENTIALS = struct.Struct("iII")


class Boot:
    """A host (controller host or node) that is being started.

    If the object is closed without `commit`, the host ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        host: str,
        mounts: Sequence[Mount],
        *,
        environment: Mapping[str, str],
        log: Path,
        record: Path | None = None,
    ) -> None:
        """Start the init of a host.

        Args:
            command: Ends in the path of init.py and the cluster's name.
            host: The host's name.
            mounts: The mounts to make, in order.
            environment: The init's environment.
            log: The file for the init's output.
            record: The file in which the init records its own pid and start time, if any.
        """
        self.host = host
        self._log = log
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs, log.open("ab") as output:
            self._launcher = subprocess.Popen(
                [*command, host, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                cwd="/",
                start_new_session=True,
            )
        spec: dict[str, Any] = {
            "record": str(record) if record else None,
            "booted": record is None,
            "mounts": list(mounts),
        }
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(json.dumps(spec).encode())

    def wait_ready(self, timeout_s: float = 10.0) -> ProcessId:
        """Wait until the mounts are in place; return the init with its pid on this machine."""
        if not select.select([self._channel], [], [], timeout_s)[0]:
            raise DevclusterError(
                f"host {self.host} did not come up within {timeout_s:g} s: {read_log_tail(self._log)}"
            )
        message, ancillary, _, _ = self._channel.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        if message != b"ready":
            reason = message.decode().removeprefix("error: ") or f"its init ended: {read_log_tail(self._log)}"
            raise DevclusterError(f"host {self.host} did not come up: {reason}")
        self._launcher.wait(timeout_s)
        pid = _CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0]
        if (found := processes.identify(pid)) is None:
            raise DevclusterError(f"host {self.host} ended at once: {read_log_tail(self._log)}")
        return found

    def commit(self) -> None:
        """Let the host live without this process from now on."""
        self._channel.send(b"commit")
        self._channel.close()

    def close(self) -> None:
        """Close the dialogue; a host without `commit` ends."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(5.0)
