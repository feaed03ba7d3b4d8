"""The agent: one process per (job, node) that owns the replicas' memory and runs as the job's owner.

The agent lives from the prolog of the job's first incarnation on this node to the job's end. The agent is attached
while an incarnation runs here, and detached (keeping its copies) between incarnations. One event loop changes all
state. Digests, page reservation and bulk transfers run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gemini_hpc import clock, logs
from gemini_hpc.agent import handover, own_directory, spares
from gemini_hpc.agent.closed_trainings import ClosedTrainings
from gemini_hpc.agent.controller_link import ControllerLink
from gemini_hpc.agent.coordinator import Coordinator
from gemini_hpc.agent.cpu_use import CpuUse
from gemini_hpc.agent.good_end import GoodEnd
from gemini_hpc.agent.hangs import Hangs
from gemini_hpc.agent.inspect_part import InspectView
from gemini_hpc.agent.launches import Launches
from gemini_hpc.agent.own_directory import OwnDirectory
from gemini_hpc.agent.peer_server import PeerServer
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.event_log import EventLog
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.listen_address import find_interface_address
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import Begin, Heard, Linked, Log, Send, Tick
from gemini_hpc.agent.peers.tasks import Tasks
from gemini_hpc.agent.plain_ends import PlainEnds
from gemini_hpc.agent.predecessor import Predecessor
from gemini_hpc.agent.rank_requests import RankRequests
from gemini_hpc.agent.recovery_member import RecoveryMember
from gemini_hpc.agent.replicas.closings import Closings
from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.agent.replicas.outlines import Outlines
from gemini_hpc.agent.replicas.pledges import Pledges
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.seal_notes import SealNotes
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.rescue import Rescue
from gemini_hpc.agent.restart_state import StateFile
from gemini_hpc.agent.retention import Retention
from gemini_hpc.agent.self_fence import SelfFence
from gemini_hpc.agent.sessions import Sessions
from gemini_hpc.agent.sick_nodes import SickNodes
from gemini_hpc.agent.stats_store import StatsStore
from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.agent.tier.flush import FlushRequests
from gemini_hpc.agent.tier.keeps import NamedVersions
from gemini_hpc.agent.tier.node_writer import NodeWriter
from gemini_hpc.agent.tier.salvage import Salvage
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.agent.tier.tier_parts import TierParts
from gemini_hpc.agent.transfer.pull_scheduler import PullScheduler
from gemini_hpc.agent.transfer.push_receiver import PushReceiver
from gemini_hpc.agent.transfer.push_sender import PushSender
from gemini_hpc.agent.transfer.rdma import Rdma
from gemini_hpc.agent.transfer.transfers import Transfers
from gemini_hpc.agent.wake_peers import Wake
from gemini_hpc.core import hostlist
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.views import View
from gemini_hpc.node import map_file
from gemini_hpc.wire import inspect_schema, local, peer, protocol
from gemini_hpc.wire.evacuate import EvacuateAsk, Evacuated
from gemini_hpc.wire.link import Link
from gemini_hpc.wire.local_server import LocalClient, LocalServer, Reply
from gemini_hpc.wire.message import Message

_ROUNDS = (peer.Collect, peer.InventoryUp, peer.PlanDown, peer.PlanAck, peer.Go, peer.RoundLost, peer.NeedRound)
_SCAVENGES = (peer.SalvageHave, peer.SalvageAsk, peer.SalvageWrite, peer.SalvageWrote, peer.SalvageOver)
_Receive = Callable[[Incarnation, str, Any], None]  # with the peer's host and its message
_Answer = local.Message | Reply  # a reply has descriptors
_log = logging.getLogger("gemini_hpc.agent")
_HOLD_S, _HOLD_POLL_S = 10.0, 0.05  # seconds in which a killed agent has released its memory and its directory
_TICK_S = 0.2  # beats of 1 s and shorter limits need several looks a second
_LOOK_S = 0.4  # bound on the search for missing agents when the prolog waits for its answer
_ASK_S = 5.0  # an admitted caller sends its request at once
_EVACUATED_S = 0.05  # interval of looks whether the job has left a node
_PLACE_S = 0.5  # pause between looks at the agent's own directory: a prolog waits for it for longer


class Agent:
    """The agent of one job on this node. `run` returns when all memory has been freed."""

    def __init__(self, identity: AgentIdentity, share: tuple[int, str] = (0, "")) -> None:
        """Create the agent's parts and connect them.

        Args:
            identity: The agent's identity.
            share: The job's share of the node's memory cap, as the prolog knows it; see `Budget`.
        """
        self.identity, settings, directory = identity, identity.settings, identity.directory
        identity.address, identity.interface = find_interface_address(settings.interface)
        membership = self.membership = Membership()
        events = EventLog(identity.node, lambda: membership.restart, self._print)
        context = AgentContext(identity, membership, events, Tasks(events.log).spawn)
        self._log, self._complain, self._spawn = events.log, events.log_rate_limited, context.spawn
        self._local: LocalServer | None = None
        self._place = OwnDirectory(directory, identity.uid)
        self._looked_at, self._reported_gone = -math.inf, False

        self.store = store = Store(Budget(settings, *share))
        self._notes = SealNotes(directory)
        self.trainings = trainings = Trainings(context, store, self._notes, self._on_sealed)
        self.state = StateFile(directory)
        self.pledges = Pledges(directory)
        self._sick = sick = SickNodes(context, self._leave_sick_node)
        self.launches = Launches(context, sick.report_end, sick.report_unhealthy, lambda: trainings.begun)
        self._hangs = Hangs(context, trainings, self.launches, sick.record_hang)
        stats, self._cpu = StatsStore(), CpuUse(settings, store)
        self._unmapped: list[int] = []  # restarts in a row that began without the agents of all nodes
        self.controller_link = ControllerLink(context, self)
        events.add_follower(self.controller_link.send_event)
        self._predecessor = Predecessor(context, self.controller_link)

        outlines, rejections = Outlines(context), Rejections(self.pledges, events.log)
        filling = SlotWrites(context, trainings, store.pool, outlines.send_digest)
        closings = Closings(membership, self.pledges, events.log)
        self._replicas = replicas = Replicas(store, trainings, filling, outlines, rejections, closings)

        self._choice = choice = TierChoice(settings, identity.uid, membership)
        keeps = NamedVersions(context, self.pledges, rejections, choice, on_waiting=self._keep_wanted)
        writer = NodeWriter(context, store)
        saver = Saver(context, trainings, choice, keeps, rejections, writer, is_salvaging=lambda: self.salvage.busy)
        self.salvage = Salvage(context, trainings, store, rejections, saver, writer)
        tier = TierParts(choice, keeps, writer, saver, self.salvage)
        self.keeps, self.saver = keeps, saver

        self.rdma = rdma = Rdma(settings.rdma, events.log)
        self.transfers = Transfers(
            PushReceiver(membership, trainings, store, filling, rdma, events.log),
            PushSender(membership, store, filling, rdma, context.spawn),
            PullScheduler(context, store, trainings, choice, self._predecessor),
        )
        self.rescue = Rescue(context, replicas, self.transfers.incoming.drop_peers, self.controller_link.register)
        self.spares = spares.Spares(identity.node, membership, self.rescue.are_sole_holders)
        self._closed = closed = ClosedTrainings(context, replicas, tier)
        ends = PlainEnds(identity.node, self.launches)
        self.service = RankRequests(
            context,
            Sessions(context, replicas, tier, stats, ends, self.controller_link),
            replicas,
            self.transfers,
            tier,
            closed,
            self.rescue,
            stats,
        )
        self.member = RecoveryMember(
            context,
            self.state,
            replicas,
            self.transfers,
            tier,
            self.service,
            Coordinator(context, replicas, tier, self.controller_link, self._predecessor),
            self._predecessor,
        )
        self._retention = Retention(context, store.budget, tier, self._announce_end, clock.monotonic())
        self._good_end = GoodEnd(context, trainings, tier, self._retention, lambda: self.finished)
        self._waker = Wake(context, self.attach)
        self._fence = SelfFence(context, self.controller_link, trainings)
        self._view = InspectView(
            context,
            replicas,
            saver,
            stats,
            self._cpu,
            self.state,
            rdma,
            list_live_ranks=self.rescue.list_live_ranks,
        )
        self._peer_server = PeerServer(
            context,
            store,
            self._waker,
            self._view,
            lambda: self.member.build_inventory(verify=False),
            self.on_nodes_lost,
            self._retention,
            {
                "push": self.transfers.incoming.serve,
                "wake": self._waker.answer,
                "flush": FlushRequests(context, trainings, saver, self.salvage).answer,
                "evacuate": self._answer_evacuation,
            },
        )
        self._receivers = self._register_receivers()
        self._handlers: dict[type, Callable[[Any], _Answer | Awaitable[_Answer]]] = {
            local.Attach: self.attach,
            local.Epilog: self._on_epilog,
            local.LaunchRequest: self.launches.answer,
            local.VerdictRequest: self._build_verdict,
            local.TakeOver: lambda m: handover.give_copy(m, store, self._retention.explain_refusal, self._log),
        }

    def _register_receivers(self) -> dict[type[Message], _Receive]:
        """Return the receiver of each type of message from a peer."""
        outlines, keeps, salvage = self._replicas.outlines, self.keeps, self.salvage
        receivers: list[tuple[_Receive, Sequence[type[Message]]]] = [
            (lambda incarnation, host, m: incarnation.step(Heard(host, m)), _ROUNDS),
            (self.trainings.on_message, (peer.VoteUp, peer.DecisionDown)),
            (self.launches.on_message, (peer.Launch,)),
            (self._sick.on_message, (peer.RankEnded, peer.FailedFirst, peer.Unhealthy)),
            (self._closed.on_message, (peer.ClosedUp, peer.ClosedDown)),
            (self._hangs.on_message, (peer.StandingUp, peer.HungDown)),
            (lambda _, host, m: self._step_spares(Heard(host, m)), (peer.MoveUp, peer.HoldDown)),
            (lambda _, host, m: outlines.on_outline(host, m), (peer.Outline, peer.OutlineDigest)),
            (self.saver.on_message, (peer.SaveDown, peer.SaveUp, peer.SaveOver)),
            (lambda _, host, m: keeps.on_message(host, m), (peer.KeepWish, peer.KeepDone)),
            (lambda _, host, m: salvage.on_message(host, m), _SCAVENGES),
        ]
        return {kind: receive for receive, kinds in receivers for kind in kinds}

    # ---- life ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until released, then free all memory and remove the agent's files."""
        asyncio.get_running_loop().set_exception_handler(self._on_failure)
        identity, membership = self.identity, self.membership
        deadline = clock.monotonic() + _HOLD_S
        while not self._place.lock_directory():
            if clock.monotonic() > deadline:
                return  # the prolog and the supervisor started one each at the same time: one is enough
            await asyncio.sleep(_HOLD_POLL_S)
        server, self.identity.port = await self._peer_server.listen()
        map_file.end_wait(identity.directory)
        if identity.again:
            self._take_over(None)
        if identity.settings.interface and not identity.interface:
            self._log(
                "error",
                detail=f"interface {identity.settings.interface} has no IPv4 address: listening on all others",
            )
        self._local = LocalServer(
            f"{identity.directory}/{own_directory.SOCKET}",
            identity.uid,
            self._handle_local,
            self.service.on_disconnect,
            self._complain,
        )
        self.controller_link.start()
        self.rdma.start(self._spawn)
        self._spawn(self._tick())
        await self._retention.over.wait()
        self._local.close()  # the epilog waits for this close, and for no answer
        mesh = membership.incarnation.mesh if membership.incarnation is not None else None
        await asyncio.gather(
            self.controller_link.hang_up(), *([mesh.wait_until_informed()] if mesh is not None else [])
        )
        server.close()
        if mesh is not None:
            mesh.close()
        self.saver.close()
        await self.saver.leave(self.salvage.gathering)
        await self.transfers.cease()
        self.trainings.close()
        self.store.clear()
        self.store.pool.close()
        map_file.remove(identity.directory)
        map_file.end_wait(identity.directory)
        self.state.remove()
        self._notes.remove()
        self.pledges.remove()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = clock.monotonic()
            self._cpu.take_sample(now)
            self.controller_link.beat(now)
            self._fence.check_alone(now)
            self.trainings.beat()
            if now - self._looked_at > _PLACE_S and not self._retention.over.is_set():
                self._looked_at = now
                self._check_directory()
            if self.membership.detached:
                self._retention.check_memory(now)
                self._stop_watching(now)
                self._good_end.check_doubt()
                continue
            if (incarnation := self.membership.incarnation) is not None:
                incarnation.step(Tick(now, incarnation.mesh.list_linked()))
            self.member.tend()
            self.keeps.tend(now)
            self.transfers.incoming.tend()
            self._closed.tend()
            self._hangs.check_progress(now)
            self._retention.note_running(now)

    def _check_directory(self) -> None:
        """Listen in the directory that root has made again after the old one was unmounted or emptied."""
        found = self._place.check_directory()
        if found == "gone":
            if not self._reported_gone:
                what = (
                    f"{self.identity.directory} is unmounted or covered: ranks and commands cannot reach this agent"
                )
                self._log("unreachable", detail=f"{what} until the job's next step, prolog or epilog here")
            self._reported_gone = True
            return
        if found == "moved":
            self._notes.close_file()
        if found != "here" and self._local is not None:
            try:
                self._local.bind_again()
            except OSError as exc:
                self._complain(f"cannot listen in {self.identity.directory}: {exc.strerror}")
                return
        if found != "here" or self._reported_gone:
            self._log("reachable", detail=f"listens in {self.identity.directory} again")
        self._reported_gone = False

    def _stop_watching(self, now: float) -> None:
        """Stop watching peers some time after the job's end here, if none has been found dead.

        No node was then lost before the script failed. With a dead node, deaths are reported for longer
        (`Retention.has_just_ended`).
        """
        incarnation = self.membership.incarnation
        if incarnation is None or incarnation.mesh.dead:
            return
        if self._retention.compute_ended_s(now) > self.identity.settings.compute_detection_s():
            incarnation.mesh.detector.watching = False

    async def release_on_word(self, reason: str, *, save: bool = False) -> None:
        """End this incarnation on the controller's order, after ending the ranks that still train here.

        Args:
            reason: Reason for the log.
            save: The job is over, too: save all unsaved versions first.
        """
        if not self.membership.detached and self._fence.list_ranks():
            await self._fence.fence(f"{reason}; ending the ranks that still run here")
        self._retention.leave(clock.monotonic(), reason, save=save)

    def _announce_end(self, why: str) -> None:
        """Report the end, and announce it to the peers if the job has succeeded. All memory is freed next."""
        self._log_end("released", why)
        if self.saver.succeeded and (incarnation := self.membership.incarnation) is not None:
            incarnation.mesh.leave()

    def _log_end(self, name: str, detail: str) -> None:
        """Log an end of this incarnation, with its sealed versions.

        After the agent's end only the log has them.
        """
        found = [(s.name, s.sealed) for s in self.trainings if s.sealed is not None]
        words = [f"sealed {name} {stamp.epoch}:{stamp.version}" for name, stamp in found[:8]]
        newest = max((stamp.version for _, stamp in found), default=0)
        self._log(name, version=newest, detail="; ".join([detail, *words]))

    def _on_failure(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._complain(f"{context.get('message', 'failed')}: {context.get('exception')!r}")

    def _print(self, t: float, name: str, version: int, detail: str) -> None:
        identity, restart = self.identity, self.membership.restart
        line = "job=%d restart=%d event=%s host=%s version=%d t=%.3f detail=%r"
        _log.info(line, identity.job, restart, name, identity.node, version, t, detail)

    # ---- incarnations ----------------------------------------------------------------------------------

    async def attach(self, m: local.Attach) -> local.Message:
        """Enter an incarnation on the request of the prolog or of a peer.

        The answer comes when the agents agree, or when they do not agree in time.
        """
        identity, membership = self.identity, self.membership
        if m.job != identity.job or m.node != identity.node:
            return local.Error(f"this is the agent of job {identity.job} on {identity.node}")
        if membership.incarnation is None:
            self._take_over(m)
        incarnation = membership.incarnation
        if m.restart < membership.restart:
            return local.Error(f"restart {m.restart} is over, the job is at restart {membership.restart}")
        if incarnation is None or m.restart > incarnation.restart or m.nodelist != incarnation.attach.nodelist:
            try:
                view = _build_view(m)
            except ValueError as exc:
                return local.Error(f"node list: {exc}")
            if m.replicas > view.wanted:
                self._log(
                    "refused", detail=f"{m.replicas} replicas need as many nodes, and the job trains on {view.wanted}"
                )
            incarnation = self._begin_incarnation(m, view)
            if m.bereft:
                self._log(
                    "bereft", detail="an earlier agent of the job here is gone, with its directory and its copies"
                )
            if incarnation.leads and m.restart == 0 and self.saver.tier:
                self._spawn(self.saver.check_once())
        membership.detached = False
        bound_s = max(0.2, identity.settings.attach_timeout_s - 0.5)
        try:
            async with asyncio.timeout(bound_s):
                await incarnation.wait_live()
        except TimeoutError:
            map_file.end_wait(identity.directory)
            absent = await incarnation.find_absent(_LOOK_S)
            missing = f"; no agent answers on {', '.join(absent)[:200]}" if absent else ""
            self._log(
                "unmapped",
                detail=f"not all agents of {len(membership.hosts)} nodes agreed within {bound_s:g} s{missing}",
            )
            if m.restart not in self._unmapped:
                self._unmapped.append(m.restart)
            return local.Ready("unmapped", absent, self._find_sealed()[1])
        self._unmapped.clear()
        return local.Ready("mapped")

    def _begin_incarnation(self, m: local.Attach, view: View) -> Incarnation:
        incarnation = self._enter_incarnation(m, view, begun=True)
        if incarnation.leads:
            incarnation.step(Begin(""))
        self._spawn(self._waker.summon_absent(incarnation))
        return incarnation

    def _enter_incarnation(self, m: local.Attach, view: View, *, begun: bool) -> Incarnation:
        """Enter a new incarnation, or another view of it, with new links and new rounds. The copies stay.

        Args:
            m: The message that begins the incarnation.
            view: Its nodes.
            begun: This agent is the first of the incarnation here.
        """
        identity, membership, hosts = self.identity, self.membership, view.hosts
        before = membership.incarnation
        expected: tuple[str, ...] = ()
        rounds = RecoveryRounds(identity.node, identity.instance, hosts, self._choice.accepts)
        same = before is not None and before.restart == m.restart and bool(view.lost)
        if before is not None:
            expected = tuple(h for h in before.hosts if h not in before.mesh.dead)
            rounds.round = before.rounds.round if same else 0
            before.close()
        self.salvage.reset()
        self.service.drop_all()
        if not same:
            self.launches.reset()
        map_file.remove(identity.directory)
        membership.detached = self.saver.succeeded = False
        self._retention.note_attach()
        self._good_end.forget_end()
        mesh = Mesh(identity, m.restart, hosts, self, self._complain, expected=expected, lost=m.lost)
        membership.incarnation = incarnation = Incarnation(m, view, mesh, rounds, self.member.perform)
        if begun:
            self.member.store_attach(m)  # written to disk before any peer or the controller learns of it
        mesh.want(mesh.list_ring_neighbours())
        mesh.want(rounds.children)
        if rounds.parent is not None:
            mesh.want([rounds.parent])
        paid = f", memory counted in {self.store.budget.cgroup_path}" if self.store.budget.cgroup_path else ""
        spares = f", {view.spares} of them spares" if view.spares else ""
        if not same:
            self._log("attached", detail=f"{len(hosts)} nodes{spares}, {m.replicas} replicas{paid}")
        self.controller_link.register()
        return incarnation

    def _take_over(self, wanted: local.Attach | None) -> None:
        """Continue where this agent's dead predecessor was. Its trainers hand the memory back.

        Args:
            wanted: Continue only if the predecessor was in this very incarnation. The prolog may be faster than the
                supervisor.
        """
        state, identity = self.state.read(), self.identity
        if state is None:
            return
        m = state.attach
        if wanted is not None and (m.restart, m.nodelist, m.node) != (wanted.restart, wanted.nodelist, wanted.node):
            return
        try:
            view = _build_view(m)
            known = set(view.hosts) if state.plan is None else set(state.plan.noderanks)
            if not known <= set(view.hosts) or len(known) < min(view.wanted, len(view.hosts)):
                raise ValueError("its two lists of nodes differ")
        except ValueError as exc:
            what = f"{identity.directory}/state cannot be used, so this agent waits for the job's next prolog"
            self._log("error", detail=f"{what}: {exc}")
            return
        incarnation = self._enter_incarnation(m, view, begun=False)
        self._log("restarted", detail="waiting for the training processes to hand their memory back")
        self.member.succeed(incarnation, state)
        if not state.live:
            self._spawn(self._waker.summon_absent(incarnation))

    def _leave_job(self) -> None:
        """Detach and end the ranks here: the job goes on without this node."""
        membership = self.membership
        self.launches.note_left_out()
        membership.detached = True
        self._retention.note_end(clock.monotonic())
        if membership.incarnation is not None:
            membership.incarnation.mesh.detector.watching = False
        map_file.remove(self.identity.directory)
        self.state.remove()
        self._spawn(self._fence.end_ranks())

    def _on_epilog(self, m: local.Epilog) -> local.Message:
        identity, membership = self.identity, self.membership
        if m.job != identity.job:
            return local.Error(f"this is the agent of job {identity.job}")
        if m.restart < membership.restart:
            return local.Ok("detached")
        mesh = membership.incarnation.mesh if membership.incarnation is not None else None
        hold = first = False
        if not membership.detached:
            membership.detached = True
            membership.record_stop(clock.time())
            self._retention.note_end(clock.monotonic())
            # the controller decides about the job by whether the training had finished
            self.controller_link.register()
            if mesh is not None:
                # A node's loss may end the script, with any exit code, before any agent here notices the loss.
                mesh.detector.record_job_end(clock.monotonic())
                alive = [h for h in mesh.hosts if h not in mesh.dead]
                hold = bool(mesh.dead) and alive[:1] == [identity.node] and not self.controller_link.connected
            map_file.begin_wait(identity.directory)
            self.state.remove()
            self._log_end("detached", f"exit code {m.exit_code or 'unknown'}")
            first = True
        # With dead or silent peers the job may be about to restart; only the controller knows.
        dead = mesh is not None and bool(mesh.dead or mesh.list_silent())
        idle = (
            membership.map_restart == membership.restart
            and identity.node not in membership.noderanks
            and not list(self.store)
        )
        if (idle or self.launches.is_left_out) and m.exit_code == "0":
            if mesh is not None:
                mesh.leave()
            self._retention.release("the job has ended with success, without this node")
            return local.Ok("released", check=self._sick.suspects_this_node)
        if self._good_end.free_if_succeeded(m.exit_code):
            return local.Ok("released", check=self._sick.suspects_this_node)
        if first:
            self.saver.on_detached(dead=dead)
        return local.Ok("hold" if hold else "detached", membership.restart, self._sick.suspects_this_node)

    # ---- peers -----------------------------------------------------------------------------------------

    def on_link(self, host: str) -> None:
        """Handle a new link to a peer."""
        incarnation = self.membership.incarnation
        assert incarnation is not None  # the link belongs to it
        incarnation.step(Linked(host))
        self.trainings.on_link(incarnation, host)
        self.launches.on_link(incarnation, host)
        self._replicas.outlines.on_link(host)
        self._closed.on_link(incarnation, host)

    def on_message(self, host: str, message: protocol.AnyMessage) -> None:
        """Handle a message of a peer."""
        incarnation = self.membership.incarnation
        assert incarnation is not None
        if (receive := self._receivers.get(type(message))) is not None:
            receive(incarnation, host, message)

    def on_dead(self, host: str, witnesses: tuple[str, ...], known: bool) -> None:
        """Handle the death of a peer, see `MeshListener`."""
        if self.membership.incarnation is None or not self.should_report_deaths(clock.monotonic()):
            return
        if not self.membership.detached:
            self.trainings.show_dead()
        self.membership.record_stop(clock.time(), host)
        if not known:
            self._log("detected", detail=f"{host} is silent; witnesses {', '.join(witnesses)}")
        self.rescue.on_death()
        self.controller_link.report_death(host, witnesses)
        self._step_spares(spares.Died())

    def on_nodes_lost(self, hosts: tuple[str, ...]) -> None:
        """Handle the view of a peer that goes on without these nodes."""
        self._step_spares(spares.NodesLost(hosts))

    def _leave_sick_node(self, host: str, why: str) -> None:
        """Leave a node that is alive and does harm, if a spare replaces it."""
        why_not = self.spares.explain_refusal([host])
        if not why_not:
            self._step_spares(spares.Leave([host], "sick"))
        outcome = f"the job stays on {host}: {why_not}" if why_not else f"the job moves off {host}"
        self._log("sick", detail=f"{why}: {outcome}")

    def _keep_wanted(self) -> None:
        self.saver.keep_all()

    def _on_sealed(self, training: Training, stamp: Stamp) -> None:
        self._cpu.record_seal(training, stamp)
        if stamp.epoch == self.membership.epoch:
            self.membership.record_seal(training.name)
        self.transfers.pulls.stop_overtaken(training.name, stamp)
        self._step_spares(spares.Sealed())
        self.move_off(self._sick.list_sick_nodes())  # perhaps found sick before a requeue
        self._predecessor.release_after_seal(self.trainings)
        incarnation = self.membership.incarnation
        if incarnation is not None and incarnation.leads:
            self.saver.on_sealed(training, stamp)

    # ---- spares ----------------------------------------------------------------------------------------

    def move_off(self, hosts: Sequence[str]) -> str:
        """Leave these nodes right after the next seal. Return why not, or ""."""
        reason = self.spares.explain_refusal(hosts)
        if not reason:
            self._step_spares(spares.Move(frozenset(hosts).intersection(self.membership.hosts)))
        return reason

    async def _answer_evacuation(self, link: Link) -> None:
        """Serve one admitted caller of `gemini-hpc evacuate`."""
        async with asyncio.timeout(_ASK_S):
            message = await link.receive()
        if not isinstance(message, EvacuateAsk):
            return
        host, deadline = message.host, clock.monotonic() + 2 * spares.SEAL_S
        reason = self.move_off([host]) if host != self.identity.node else "ask an agent of another node"
        while not reason and host not in self.membership.lost:
            if clock.monotonic() > deadline:
                reason = f"the job still runs on {host}: see gemini-hpc inspect"
            await asyncio.sleep(_EVACUATED_S)
        await link.flush(Evacuated(reason))

    def _step_spares(self, event: spares.Event) -> None:
        """Carry out the effects of an event on the rules of spares."""
        for effect in self.spares.step(event, clock.monotonic()):
            match effect:
                case Send(host, message):
                    self.membership.send(host, message)
                case Log(name, detail, version):
                    self._log(name, version=version, detail=detail)
                case spares.Later():
                    self._spawn(self._step_spares_later(effect))
                case spares.Hold(epoch):
                    self.trainings.hold_ranks(epoch)
                case spares.EnterView(attach, gone, why):
                    self._begin_incarnation(attach, _build_view(attach))
                    self.launches.record_loss(gone, why)
                case spares.EndLocalWork():
                    self._leave_job()

    async def _step_spares_later(self, order: spares.Later) -> None:
        await asyncio.sleep(order.after_s)
        if order.rescued:
            await self.rescue.wait_idle()
        self._step_spares(order.event)

    # ---- the controller --------------------------------------------------------------------------------

    def inspect(self, request: int) -> inspect_schema.InspectPart:
        """Return this node's view of the job."""
        return self._view.build_part(request, self._retention.compute_kept_until())

    def on_ending(self, left_s: int | None) -> None:
        """Note that Slurm ends the job in so many seconds. None means that no time is set."""
        self.saver.record_time_left(left_s)

    def on_draining(self, hosts: Sequence[str], partition: str) -> None:
        """Note that these nodes, or the partition, are being drained."""
        self.saver.on_draining(hosts, partition)
        for host in hosts:
            if host != self.identity.node:
                self.move_off([host])

    @property
    def rescuing(self) -> bool:
        """Return whether live state is being copied."""
        return self.rescue.busy

    @property
    def finished(self) -> bool | None:
        """Return whether all ranks that train here have closed their checkpointers; None if none has trained."""
        trained = [training for training in self.trainings if training.greeted]
        return all(training.succeeded for training in trained) if trained else None

    def on_job_pending(self) -> None:
        """Note that the job is pending."""
        self._retention.note_pending()

    def should_report_deaths(self, now: float) -> bool:
        """Return whether a death may still be news for the controller."""
        return not self.membership.detached or self._retention.has_just_ended(now)

    # ---- the local socket ------------------------------------------------------------------------------

    async def _handle_local(self, client: LocalClient, request: local.Request, fds: list[int]) -> Reply:
        if (handle := self._handlers.get(type(request))) is None:
            return await self.service.handle(client, request, fds)
        for fd in fds:
            os.close(fd)
        found = handle(request)
        answer = await found if isinstance(found, Awaitable) else found
        return answer if isinstance(answer, tuple) else (answer, [])

    def _build_verdict(self, _: local.VerdictRequest) -> local.Verdict:
        incarnation = self.membership.incarnation
        if incarnation is None:
            return local.Verdict()
        mesh, silent = incarnation.mesh, incarnation.mesh.list_silent()
        alive = tuple(h for h in incarnation.hosts if h not in mesh.dead and h not in silent)
        dead, suspect = tuple(sorted(mesh.dead)), tuple(sorted(silent - mesh.dead))
        spared = incarnation.view.exclude(dead, self.membership.nodes) is not None
        begun, last = self.trainings.begun, self.launches.last
        unmapped = len(self._unmapped)
        return local.Verdict(dead, suspect, alive[:1000], self._find_sealed(), begun, spared, last, unmapped)

    def _find_sealed(self) -> tuple[int, int]:
        """Return epoch and version of the newest sealed version of all trainings; (0, 0): none."""
        epoch, version = max((s.sealed for s in self.trainings if s.sealed is not None), default=(0, 0))
        return epoch, version


def _build_view(m: local.Attach) -> View:
    """Return an incarnation's nodes as a prolog, a peer or a predecessor has named them.

    A spare that the copies need does not count as a spare.

    Raises:
        ValueError: The list lacks this node, has a node twice, or lacks a lost node.
    """
    hosts = tuple(hostlist.expand(m.nodelist))
    view = View(hosts, max(0, min(m.spares, len(hosts) - m.replicas)), frozenset(m.lost))
    if m.node not in view.hosts or len(set(hosts)) != len(hosts) or not view.lost <= set(hosts):
        raise ValueError(f"{m.node} is not in the node list, or the list has a node twice")
    return view


def serve(identity: AgentIdentity, share: tuple[int, str] = (0, "")) -> int:
    """Run an agent in this process until it is released, and return the exit status."""
    logs.write_to(sys.stdout)

    async def run() -> None:
        await Agent(identity, share).run()

    asyncio.run(run())
    sys.stdout.flush()
    return 0
