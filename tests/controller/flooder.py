"""Run by an ordinary user: connections to HOST PORT that say nothing, NUMBER at a time, for SECONDS; those that the
other side drops are opened again. A line on stdout when they are there."""

from __future__ import annotations

import resource
import select
import socket
import sys
import time
from contextlib import suppress

host, port, number, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
until, sockets, told = time.monotonic() + seconds, dict[int, socket.socket](), False
poll = select.poll()
while time.monotonic() < until:
    while len(sockets) < number:
        one = socket.socket()
        one.setblocking(False)
        with suppress(BlockingIOError):
            one.connect((host, port))
        sockets[one.fileno()] = one
        poll.register(one, select.POLLIN)
    if not told:
        told = print(f"{number} connections", flush=True) is None
    for fd, _ in poll.poll(200):
        try:
            gone = not sockets[fd].recv(1)
        except OSError:
            gone = True
        if gone:
            poll.unregister(fd)
            sockets.pop(fd).close()
