"""Measure what a first version costs the machine: the same memory and bytes, by plain calls.

    python plainfirst.py BYTES NODES     prints a JSON line: seconds until the last node is done, and CPU seconds

Each node is a process with BYTES of state. At the same moment all of them take four slots of as many bytes (both of
their own shard, both of another node's). They map one of each, and copy the state into their own. They send it on to
the next node while they receive the other one, and hash both.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gemini_hpc.client.mapped_slots import populate

if TYPE_CHECKING:
    from benchmarks.programs import plainpush
else:  # the programs lie beside each other
    import plainpush

_STRIDE_BYTES = 16 << 20


def slot(size: int) -> int:
    """Return a descriptor of memory whose pages are taken."""
    fd = os.memfd_create("plain")
    os.ftruncate(fd, size)
    for at in range(0, size, _STRIDE_BYTES):
        os.posix_fallocate(fd, at, min(_STRIDE_BYTES, size - at))
    return fd


def mapped(fd: int, size: int) -> mmap.mmap:
    """Return a mapping of a slot, all of whose pages are there."""
    made = mmap.mmap(fd, size)
    populate(made)
    return made


def protect(state: np.ndarray[Any, np.dtype[np.uint8]], sends: socket.socket, receives: socket.socket) -> None:
    """Bring the state to the next node, and the other node's here."""
    size = len(state)
    own, _, other, _ = [slot(size) for _ in range(4)]

    def receive() -> None:
        with memoryview(mapped(other, size)) as view:
            plainpush.take(receives, view, 0, size)

    receiving = threading.Thread(target=receive)
    receiving.start()
    into = mapped(own, size)
    np.copyto(np.frombuffer(into, np.uint8), state)
    hashing = threading.Thread(target=lambda: xxhash.xxh3_128(into).digest())
    hashing.start()
    plainpush.send(sends, own, 0, 0, size)
    hashing.join()
    receiving.join()


def main() -> None:
    """Fork the nodes, start them together, and wait for all."""
    size, nodes = int(sys.argv[1]), int(sys.argv[2])
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(nodes)]
    ready, go, spent = os.pipe(), os.pipe(), os.pipe()
    for node in range(nodes):
        if os.fork():
            continue
        os.close(go[1])
        state = np.ones(size, np.uint8)
        sends = socket.create_connection(servers[(node + 1) % nodes].getsockname())
        receives, _ = servers[node].accept()
        os.write(ready[1], b"r")
        os.read(go[0], 1)  # its end, for all
        began_s = time.process_time()
        protect(state, sends, receives)
        os.write(spent[1], struct.pack("<d", time.process_time() - began_s))
        os._exit(0)
    for _ in range(nodes):
        os.read(ready[0], 1)
    began = time.monotonic()
    os.close(go[1])
    statuses = [os.wait()[1] for _ in range(nodes)]
    took_s = time.monotonic() - began
    if any(statuses):
        raise SystemExit("a node has failed")
    cpu_s = sum(struct.unpack("<d", os.read(spent[0], 8))[0] for _ in range(nodes))
    print(json.dumps({"seconds": took_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
