"""One virtual machine: a qemu process without KVM, and a serial port over which its guest runs scripts."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

MEMORY_MIB = 1024
BOOT_LIMIT_S = 900.0  # a loaded machine emulates a processor that is a hundred times slower than its own
RUN_LIMIT_S = 300.0
_ANSWER_S = 60.0  # beyond the limit of a script, for the guest to answer


class MachineError(Exception):
    """The machine does not boot, or its guest does not answer."""


@dataclass(frozen=True)
class Kernel:
    """The kernel that qemu boots. It has drivers of NVMe and ext4 in it, so it needs no initial RAM disk."""

    image: Path


class Machine:
    """A running machine of the name n1, n2 or n3."""

    def __init__(self, name: str, directory: Path, kernel: Kernel, disk: Path, wire: int) -> None:
        """Start the machine.

        Args:
            name: Name of the host, n and its number.
            directory: Directory for the socket and the console's log.
            kernel: The kernel.
            disk: The disk in the format qcow2, which the machine changes.
            wire: UDP port of the multicast group on the loopback that stands for the network.
        """
        self.name = name
        self.console = directory / f"{name}.console"
        self._port = directory / f"{name}.port"
        self._port.unlink(missing_ok=True)
        self._asked = 0
        self._pending = b""
        number = int(name[1:])
        # with la57 Linux 6.12.117 shows the mount points of /proc/mounts as "xxxx", and slurmd finds no cgroups
        words = f"console=ttyS0 root=/dev/nvme0n1 rw systemd.hostname={name} "
        words += "net.ifnames=0 systemd.show_status=1 audit=0 mitigations=off"
        self.process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "--"),
                *("qemu-system-x86_64", "-accel", "tcg", "-cpu", "max,-svm,-la57"),
                *("-smp", "1", "-m", str(MEMORY_MIB)),
                *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
                *("-kernel", str(kernel.image), "-append", words),
                *("-drive", f"if=none,id=disk,file={disk},format=qcow2,cache=unsafe"),
                *("-device", "nvme,drive=disk,serial=1"),
                *("-netdev", f"socket,id=wire,mcast=230.77.0.1:{wire},localaddr=127.0.0.1"),
                *("-device", f"virtio-net-pci,netdev=wire,romfile=,mac=52:54:00:77:00:{number:02x}"),
                *("-device", "virtio-rng-pci"),
                *("-chardev", f"socket,id=port,path={self._port},server=on,wait=off"),
                *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,nr=1"),
                *("-chardev", f"file,id=console,path={self.console},append=on", "-serial", "chardev:console"),
            ],
            stdin=subprocess.DEVNULL,
        )
        self._socket = self._connect()

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + 20.0
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(str(self._port))
                return sock
            except OSError as error:
                sock.close()
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise MachineError(f"{self.name}: qemu does not start: {error}") from None
                time.sleep(0.1)

    def booted(self, limit_s: float = BOOT_LIMIT_S) -> float:
        """Wait until the guest is there; return the seconds since its kernel began."""
        return float(self._line(limit_s)["ready"])

    def run(self, script: str, limit_s: float = RUN_LIMIT_S) -> tuple[int, str]:
        """Run a shell script as root; return its exit status (124: it took too long) and its output."""
        self._asked += 1
        asked = {"id": self._asked, "script": script, "limit_s": limit_s}
        self._socket.sendall(json.dumps(asked).encode() + b"\n")
        answer = self._line(limit_s + _ANSWER_S)
        if answer.get("id") != self._asked:
            raise MachineError(f"{self.name} answers {answer}")
        return int(answer["rc"]), str(answer["out"])

    def sh(self, script: str, limit_s: float = RUN_LIMIT_S) -> str:
        """Run a shell script as root; return its output.

        Raises:
            MachineError: The script fails.
        """
        status, output = self.run(f"set -eu -o pipefail\n{script}", limit_s)
        if status:
            raise MachineError(f"{self.name}: exit {status}: {script}\n{output}")
        return output.strip()

    def _line(self, limit_s: float) -> dict[str, object]:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            self._socket.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                tail = self.console.read_text(errors="replace")[-2000:]
                raise MachineError(
                    f"{self.name} does not answer within {limit_s:.0f} s; its console:\n{tail}"
                ) from None
            if not data:
                raise MachineError(f"{self.name} has ended")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def power_off(self, limit_s: float = 180.0) -> None:
        """Shut the guest down, so that its disk is whole."""
        self.run("systemctl --no-block poweroff")
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise MachineError(f"{self.name} does not shut down") from None
        finally:
            self.cut()

    def cut(self) -> None:
        """Kill the machine, as a power failure does."""
        self.process.kill()
        self.process.wait()
        self._socket.close()
