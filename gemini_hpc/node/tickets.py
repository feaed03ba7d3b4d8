"""The service that issues tickets to users' commands where `auth = "key"`. It runs as root, on login nodes at least.

    python3 -I -m gemini_hpc.node.tickets

The kernel says who asks (SO_PEERCRED). A user gets a key for the controller, or for the agents of a job. It ends soon
and names the user. A job of another user has another key, so nothing needs to be looked up. The service reads eight
bytes of each caller and writes one packet.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress

from gemini_hpc import clock, lines
from gemini_hpc.config import ConfigError, load_site_settings
from gemini_hpc.wire import credentials, site_key
from gemini_hpc.wire.keyed import KeyFileError, SiteKey
from gemini_hpc.wire.preauth_limit import PreauthLimit

TICKET_S = 60  # a command fetches a ticket for each connection, right before it
_CALLER_S = 1.0  # eight bytes of a local process
_MOST = 256


class TicketService:
    """The service: one bounded question and answer a connection."""

    def __init__(self, key: SiteKey) -> None:
        self._key = key
        self._callers = PreauthLimit(_MOST)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one question and answer it by a ticket."""
        _, uid = credentials.read_peer(writer.get_extra_info("socket"))
        place = self._callers.enter(str(uid), writer.transport.abort)
        try:
            async with asyncio.timeout(_CALLER_S):
                (job,) = site_key.ASK.unpack(await reader.readexactly(site_key.ASK.size))
                ticket = self._key.issue_ticket(uid, job, int(clock.time()) + TICKET_S)
                writer.write(site_key.TICKET.pack(ticket.uid, ticket.job, ticket.end_s, ticket.key))
                await writer.drain()
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._callers.leave(str(uid), place)
            writer.close()


async def serve(key: SiteKey, path: str) -> None:
    """Issue tickets at a socket that every local user may connect to, until cancelled."""
    new = f"{path}.new"  # the name that users know must always lead to a socket that accepts them
    with suppress(FileNotFoundError):
        os.unlink(new)  # of a service that ended while it began
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(new)
    os.chmod(new, 0o666)
    server = await asyncio.start_unix_server(TicketService(key).answer, sock=sock, backlog=_MOST)
    os.rename(new, path)
    async with server:
        await server.serve_forever()


def main() -> int:
    """Run until SIGTERM and return the exit status."""
    try:
        settings = load_site_settings()
        if settings.auth != "key":
            raise ConfigError(f'auth is "{settings.auth}" in the settings: only "key" has tickets')
        if os.geteuid():
            raise ConfigError("only root can issue tickets")
        asyncio.run(serve(site_key.build_site_key(settings, 0), site_key.TICKETS_PATH))
    except (ConfigError, KeyFileError, OSError) as exc:
        lines.put(sys.stderr, f"gemini-hpc tickets: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
