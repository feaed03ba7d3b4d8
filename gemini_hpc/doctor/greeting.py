"""A test greeting to the controller: does it answer, as which user, and with which clock?"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

import msgspec

from gemini_hpc.config import Settings
from gemini_hpc.wire import credentials, endpoint, hostname, site_key
from gemini_hpc.wire.frames import FrameError, bare, read_bare
from gemini_hpc.wire.handshake import MAX_HELLO_BYTES, Envelope, HandshakeClient, HandshakeError

TIMEOUT_S = 3.0


class GreetingError(Exception):
    """The error that no greeting came back; its text tells how far the exchange went."""


def greet(settings: Settings, slurm_uid: int) -> int:
    """Return the Unix time at which the controller made its answer, by its clock. Raises `GreetingError`."""
    hosts = settings.controller_hosts()
    if not hosts:
        raise GreetingError("no controller_host in the settings")
    for host in hosts[:-1]:
        with suppress(GreetingError):
            return _greet(settings, host, slurm_uid)
    return _greet(settings, hosts[-1], slurm_uid)


def _greet(settings: Settings, host: str, slurm_uid: int) -> int:
    port = settings.controller_port
    client = HandshakeClient(
        purpose="query",
        cluster=settings.cluster_name,
        job=0,
        restart=0,
        source=socket.gethostname(),
        target=host,
        instance=secrets.token_hex(8),
        server_uid=slurm_uid,
    )
    where = f"{host}:{port}"
    try:
        site_key.adopt(settings)
        with socket.create_connection((hostname.dialled(host), port), timeout=TIMEOUT_S) as sock:
            sock.sendall(bare(client.greeting(endpoint.dialled(sock))))
            envelope = msgspec.msgpack.decode(read_bare(sock, MAX_HELLO_BYTES), type=Envelope)
        if envelope.refusal:
            raise GreetingError(f"{where} refuses: {envelope.refusal[:200]}")
        opened = credentials.decode(envelope.credential)
    except FrameError:
        raise GreetingError(
            f"{where} closes the connection; possible causes: a different key there, clocks more than "
            f"{credentials.TTL_S} s apart, a different slurm_user, or another program on this port"
        ) from None
    except OSError as exc:
        raise GreetingError(f"{where}: {exc.strerror or exc}") from None
    except UnicodeError:
        raise GreetingError(f"{where}: not a host name") from None
    except HandshakeError as exc:
        raise GreetingError(str(exc)) from None
    except credentials.CredentialError as exc:
        raise GreetingError(f"{where}: {exc}") from None
    except msgspec.MsgspecError:
        raise GreetingError(f"{where} does not speak our protocol") from None
    if opened.uid not in (slurm_uid, 0):
        raise GreetingError(f"uid {opened.uid} answers at {where}, expected {settings.slurm_user} (uid {slurm_uid})")
    return opened.made_s
