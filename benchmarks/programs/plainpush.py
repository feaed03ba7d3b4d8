"""Two processes that send each other bytes over sockets, as plainly as it goes: sendfile, recv_into and xxh3.

    python plainpush.py BYTES SOCKETS [PORT]

The first one has no PORT and prints its own. For each line on standard input both send BYTES and print a JSON line:
when it began and ended (CLOCK_MONOTONIC), and the CPU seconds. Each takes the next of a few windows of its memory, so
that nothing is in the processor's cache.
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

import xxhash

CHUNK, STEP, WINDOWS = 4 << 20, 512 << 10, 2
_HEAD = struct.Struct("<QQ")


def memory(size: int) -> tuple[int, mmap.mmap]:
    """A memfd and its mapping, written to."""
    fd = os.memfd_create("plain")
    os.ftruncate(fd, size)
    view = mmap.mmap(fd, size)
    noise = os.urandom(1 << 20)
    for at in range(0, size, len(noise)):
        view[at : at + len(noise)] = noise[: min(len(noise), size - at)]
    return fd, view


def send(sock: socket.socket, fd: int, base: int, start: int, end: int) -> None:
    """Send these bytes, and wait until they have come."""
    while start < end:
        stop = min(start + CHUNK, end)
        sock.send(_HEAD.pack(start, stop - start), socket.MSG_MORE)
        while start < stop:
            start += os.sendfile(sock.fileno(), fd, base + start, stop - start)
    sock.recv(1)


def take(sock: socket.socket, view: memoryview, start: int, end: int) -> None:
    """Receive and hash as many bytes."""
    head = bytearray(_HEAD.size)
    while start < end:
        sock.recv_into(head, _HEAD.size, socket.MSG_WAITALL)
        at, count = _HEAD.unpack(head)
        hasher = xxhash.xxh3_128()
        for step in range(at, at + count, STEP):
            with view[step : min(step + STEP, at + count)] as part:
                sock.recv_into(part, len(part), socket.MSG_WAITALL)
                hasher.update(part)
        start += count
    sock.send(b"k")


def main() -> None:
    """Connect, then transfer until standard input ends."""
    size, count = int(sys.argv[1]), int(sys.argv[2])
    out, _ = memory(WINDOWS * size)
    _, into = memory(WINDOWS * size)
    if len(sys.argv) > 3:
        socks = [socket.create_connection(("127.0.0.1", int(sys.argv[3]))) for _ in range(2 * count)]
    else:
        with socket.create_server(("127.0.0.1", 0), backlog=2 * count) as server:
            print(server.getsockname()[1], flush=True)
            socks = [server.accept()[0] for _ in range(2 * count)]
        socks = socks[count:] + socks[:count]  # what one end sends on, the other end receives on
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("ready", flush=True)
    bounds = [(number * size // count, (number + 1) * size // count) for number in range(count)]
    for turn, _ in enumerate(sys.stdin):
        base = turn % WINDOWS * size
        with memoryview(into)[base : base + size] as view:
            threads = [
                threading.Thread(target=send, args=(sock, out, base, *bound))
                for sock, bound in zip(socks[:count], bounds, strict=True)
            ]
            threads += [
                threading.Thread(target=take, args=(sock, view, *bound))
                for sock, bound in zip(socks[count:], bounds, strict=True)
            ]
            cpu, began = time.process_time(), time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        line = {"began": began, "ended": time.monotonic(), "cpu_s": time.process_time() - cpu}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
