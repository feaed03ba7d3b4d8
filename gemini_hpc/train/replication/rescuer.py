"""Copies from this rank's live tensors, when the agent asks because all holders of a shard have died.

Just-in-time checkpointing (EuroSys '24, section 3): a healthy rank blocked in a collective has whole state, that of
the last completed step. A thread reads the state beside the training, which changes nothing meanwhile.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import msgspec
import torch

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.session import RankSession
from gemini_hpc.train.replication import overlap
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.train.state.layout import Plan
from gemini_hpc.wire import local

_RETRY_S = 1.0  # an agent that died is back within a second or two

Frozen = Callable[[], AbstractContextManager[CaptureJob | None]]


class Rescuer:
    """The thread of a rank that copies live tensors for the agent."""

    def __init__(
        self,
        session: RankSession,
        frozen: Frozen,
        save_at_once: Callable[[CaptureJob], None],
        plan: Callable[[], Plan],
    ) -> None:
        """Create the thread; `start` starts it.

        Args:
            session: This rank's session with its agent.
            frozen: Keeps the optimizers from changing tensors. Gives the job of the version that the tensors have;
                None while they are being changed.
            save_at_once: Brings a job's version into the slots without regard for the training's traffic.
            plan: Returns the present plan.
        """
        self._training, self._rank, self._client = session.name, session.rank, session.require_agent()
        self._frozen, self._save_at_once, self._plan = frozen, save_at_once, plan
        self._nodes: tuple[int, ...] = ()
        self._closed = threading.Event()
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="gemini-rescue", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def report_live_replicas(self, nodes: tuple[int, ...]) -> None:
        """Report the nodes whose ranks also have all of this rank's shard, from the next version on."""
        self._nodes = nodes
        if self._sock is not None:
            with suppress(AgentLost, AgentRefused):
                self._client.request(local.LiveOn(training=self._training, rank=self._rank, nodes=nodes))

    def close(self, timeout_s: float) -> bool:
        """Stop the thread. Return whether it has ended within `timeout_s` seconds."""
        self._closed.set()
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._client.request(local.LiveOn(training=self._training, rank=self._rank, nodes=self._nodes))
                reply, fds = self._client.request(local.OpenRescue(training=self._training, rank=self._rank))
            except AgentRefused:
                return  # an agent without rescue, or of another round
            except AgentLost:
                self._closed.wait(_RETRY_S)
                continue
            if not isinstance(reply, local.Ok) or len(fds) != 1:
                for fd in fds:
                    os.close(fd)
                return
            self._sock = sock = socket.socket(fileno=fds[0])
            try:
                self._serve_requests(sock)
            except (OSError, msgspec.MsgspecError):
                pass
            finally:
                self._sock = None
                sock.close()
            self._closed.wait(_RETRY_S)

    def _serve_requests(self, sock: socket.socket) -> None:
        """Answer the agent's requests until it hangs up."""
        while not self._closed.is_set():
            sock.settimeout(None)
            data, fds, _, _ = socket.recv_fds(sock, local.MAX_PACKET_BYTES, 1)
            for fd in fds:
                os.close(fd)
            if not data:
                return
            message = local.rescue_decoder.decode(data)
            if not isinstance(message, local.Still):
                continue
            with self._frozen() as job:
                sock.send(local.encode(local.Standing(0 if job is None else job.version)))
                if job is not None:
                    self._save_at_once(job)
                    self._serve_job(sock, job, message.wait_s)

    def _serve_job(self, sock: socket.socket, job: CaptureJob, wait_s: float) -> None:
        """Answer the agent's requests about the job until `GoOn`, for at most `wait_s` seconds."""
        deadline = clock.monotonic() + wait_s
        while (left_s := deadline - clock.monotonic()) > 0:
            sock.settimeout(left_s)
            try:
                data, fds, _, _ = socket.recv_fds(sock, local.MAX_PACKET_BYTES, 1)
            except TimeoutError:
                return
            try:
                message = local.rescue_decoder.decode(data) if data else local.GoOn()
                if isinstance(message, local.GoOn):
                    return
                if isinstance(message, local.Still):
                    sock.send(local.encode(local.Standing(job.version)))
                    continue
                if isinstance(message, local.Complete):
                    over = job.done.wait(min(message.wait_s, max(0.0, deadline - clock.monotonic())))
                    sock.send(local.encode(local.Copied(job.saved) if over else local.Standing(job.version)))
                    continue
                why = self._copy_tensors(job, message, fds)
                sock.send(local.encode(local.Copied(not why, why[:200])))
            finally:
                for fd in fds:
                    os.close(fd)

    def _copy_tensors(self, job: CaptureJob, order: local.CopyLive, fds: list[int]) -> str:
        """Fill in the tensors of a slot. Return the reason for a failure, or ""."""
        if len(fds) != 1 or order.version != job.version:
            return f"this rank stands at version {job.version}"
        try:
            memory = torch.frombuffer(mmap.mmap(fds[0], order.bytes), dtype=torch.uint8)
            layout, manifest = overlap.read_directory(memory)
            plan = self._plan()
            pieces = overlap.find_pieces(manifest, layout, plan.own)
            if len(pieces) != len(manifest.pieces):
                return f"{len(manifest.pieces) - len(pieces)} of its {len(manifest.pieces)} pieces are not here"
            pairs = overlap.prepare_pairs(pieces, plan.own, job.memory, memory)
            plan.capture.copy_pairs_concurrently(job, pairs)
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""
