"""The controller's side of an agent, and no memory: registers, watches its peers, reports, answers, goes on Release.

Run on a node as the job's owner: `fake_agent.py JOB RESTART HOST HOST,HOST,... [silent|accuse:HOST]`; prints one
word a line (ready, registered, released REASON, refused).
"""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
import sys
import time
from contextlib import suppress

from gemini_hpc.config import load_site_settings
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import controller, inspect_schema, peer
from gemini_hpc.wire.handshake import Caller, HandshakeClient, HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, accept, connect
from gemini_hpc.wire.ports import list_candidates

BEAT_S, SILENCE_S = 0.15, 0.6
SETTINGS = load_site_settings()
JOB, RESTART, HOST, HOSTS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], tuple(sys.argv[4].split(","))
MODE = sys.argv[5] if len(sys.argv) > 5 else ""
INSTANCE = secrets.token_hex(4)


def part(request: int) -> inspect_schema.InspectPart:
    i = HOSTS.index(HOST)
    ring = (HOSTS[i - 1], HOST)
    now = time.time()
    slots = [
        inspect_schema.HeldSlot("default", rank, len(HOSTS), rank, 0, "complete", Stamp(1, 7), 4096, 4000, now, now)
        for rank in map(HOSTS.index, ring)
    ]
    return inspect_schema.InspectPart(
        host=HOST,
        job=JOB,
        uid=os.getuid(),
        restart=RESTART,
        replicas=2,
        epoch=1,
        round=1,
        state="protected",
        hosts=HOSTS,
        noderanks={h: k for k, h in enumerate(HOSTS)},
        address=HOST,
        interface="eth0",
        port=list_candidates(SETTINGS, JOB)[0],
        memory_bytes=16384,
        memory_cap_bytes=1 << 20,
        trainings=(inspect_schema.TrainingState("default", len(HOSTS), Stamp(1, 7), "protected", (i,)),),
        held=tuple(slots),
        events=(),
        suspects=(),
        dead=(),
        request=request,
    )


def say(*words: object) -> None:
    print(*words, flush=True)


async def peer_answers(host: str) -> bool:
    try:
        async with asyncio.timeout(SILENCE_S / 2):
            _, writer = await asyncio.open_connection(host, list_candidates(SETTINGS, JOB)[0])
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def watch(link: Link, host: str) -> None:
    heard = time.monotonic()
    while True:
        await asyncio.sleep(BEAT_S)
        if await peer_answers(host):
            heard = time.monotonic()
        elif time.monotonic() - heard > SILENCE_S:
            link.send(controller.Report(JOB, RESTART, host, (HOST,), time.time()))
            heard = time.monotonic() + 1.0


async def ping(link: Link) -> None:
    while True:
        link.send(peer.Ping())
        await asyncio.sleep(0.2)


async def accuse(link: Link, host: str) -> None:
    while True:
        link.send(controller.Report(JOB, RESTART, host, HOSTS, time.time()))
        await asyncio.sleep(0.2)


async def controlled(link: Link) -> None:
    while True:
        message = await link.receive()
        if isinstance(message, inspect_schema.InspectAsk):
            link.send(part(message.request))
        elif isinstance(message, controller.Notice):
            say("notice", message.text)
        elif isinstance(message, controller.Release):
            say("released", message.reason)
            os._exit(0)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(HandshakeError, LinkClosed, OSError):
        link = await accept(
            reader,
            writer,
            lambda g: "" if g.uid in (0, os.getuid()) else "not yours",
            host=HOST,
            read_restart=lambda: RESTART,
            instance=INSTANCE,
        )
        while True:
            message = await link.receive()
            if isinstance(message, inspect_schema.InspectAsk):
                link.send(part(message.request))


async def dial(host: str) -> Link:
    caller, uid = Caller(SETTINGS.cluster_name, HOST, INSTANCE, RESTART), pwd.getpwnam(SETTINGS.slurm_user).pw_uid
    client = HandshakeClient(caller, purpose="control", job=JOB, target=host, server_uid=uid)
    return await connect(host, SETTINGS.controller_port, client)


async def reached() -> Link:
    while True:
        for host in SETTINGS.list_controller_hosts():
            with suppress(OSError, HandshakeError, TimeoutError):
                link = await dial(host)
                port = list_candidates(SETTINGS, JOB)[0]
                link.send(controller.Registration(JOB, RESTART, HOST, HOSTS, 2, port, INSTANCE, "protected"))
                event = inspect_schema.EventRecord(time.time(), "attached", "elsewhere", RESTART, 0, "fake\x1b[2J")
                link.send(controller.EventsUp(JOB, (event,)))
                say("registered")
                return link
        await asyncio.sleep(0.3)


async def main() -> None:
    if MODE != "deaf":
        await asyncio.start_server(serve, port=list_candidates(SETTINGS, JOB)[0])
    say("ready")
    while True:
        link = await reached()
        tasks = [asyncio.ensure_future(ping(link))]
        if MODE.startswith("accuse:"):
            tasks.append(asyncio.ensure_future(accuse(link, MODE.split(":")[1])))
        elif MODE != "silent":
            tasks += [asyncio.ensure_future(watch(link, h)) for h in HOSTS if h != HOST]
        try:
            await controlled(link)
        except LinkClosed:
            say("refused")
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.3)


asyncio.run(main())
