"""A store for checkpoints at the other end of a link: takes 8 bytes of length and as many bytes, answers with one.

    python store.py PORT

Nothing is kept: it is as fast as its link. Prints a line when it listens; serves until killed.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading

PIECE_BYTES = 1 << 20


def serve(sock: socket.socket) -> None:
    """One connection, until its other end closes it."""
    piece = bytearray(PIECE_BYTES)
    with sock:
        while len(head := sock.recv(8, socket.MSG_WAITALL)) == 8:
            (left,) = struct.unpack("<Q", head)
            while left:
                got = sock.recv_into(piece, min(left, PIECE_BYTES))
                if not got:
                    return
                left -= got
            sock.sendall(b"+")


def main() -> None:
    listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
    print("ready", flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main()
