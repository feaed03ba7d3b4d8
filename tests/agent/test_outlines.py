"""What a peer says of its shards beside the tensors: kept where it fits, and nothing else."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.replicas.outlines import Outlines
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.core.moments import UNCOUNTED
from gemini_hpc.core.placement import AS_RANKED
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import ShardManifest, TensorRow
from gemini_hpc.format.slot_header import SlotLayout, parse_header
from gemini_hpc.wire import peer, protocol
from gemini_hpc.wire.message import Message

from .contexts import made_context

HOSTS = {f"n{k + 1}": k for k in range(4)}
SMALL = b"generators"
_ROW = TensorRow("w", "uint8", (256,), True, "cpu")
DIRECTORY = shard_manifest.pack(
    ShardManifest(2, 4, (_ROW,), shard_manifest.place_boxes((_ROW,), [(0, (128,), (64,))]))
)
LAYOUT = SlotLayout.plan(len(DIRECTORY), 64, 4096)
AREAS = LAYOUT.manifest_bytes, LAYOUT.tensor_bytes, LAYOUT.small_capacity
KEY = xxhash.xxh3_128(DIRECTORY).hexdigest()


class Here:
    """Node n1 of a job of four with two replicas, in epoch 3."""

    noderanks, nodes, replicas, round, epoch, order = HOSTS, 4, 2, 5, 3, AS_RANKED
    redundancy = Redundancy(4, 2)

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.live = self.incarnation = SimpleNamespace(mesh=SimpleNamespace(links={}))

    def send(self, host: str, message: Message) -> bool:
        self.sent.append((host, message))
        return True


def spawn(coroutine: Coroutine[Any, Any, Any]) -> Any:
    coroutine.close()


def kept(here: Here) -> Outlines:
    return Outlines(made_context(here, spawn=spawn))


def outline(version: int = 7, **changes: Any) -> peer.Outline:
    told = peer.Outline(
        5, "default", 2, 4, 2, LAYOUT.total, Stamp(3, version), AREAS, SMALL + str(version).encode(), KEY, DIRECTORY
    )
    return msgspec.structs.replace(told, **changes)


def test_a_slot_is_filled_but_for_its_tensors() -> None:
    outlines = kept(Here())
    outlines.on_outline("n3", outline())
    found = outlines.find("default", 2, Stamp(3, 7))
    assert found is not None and not found.digest
    slot = bytearray(LAYOUT.total)
    found.fill(memoryview(slot))
    header = parse_header(slot[:4096], LAYOUT.total)
    assert (header.rank, header.world, header.stamp) == (2, 4, Stamp(3, 7))
    assert header.used_bytes == found.used_bytes and slot[LAYOUT.small_offset :].startswith(SMALL + b"7")
    assert not any(slot[LAYOUT.tensor_offset : LAYOUT.tensor_offset + 64])


def test_the_directory_comes_once_and_the_digest_later() -> None:
    outlines = kept(Here())
    for version in (7, 8, 9, 10):
        outlines.on_outline("n3", outline(version, directory=DIRECTORY if version == 7 else b""))
    assert outlines.find("default", 2, Stamp(3, 7)) is None, "only the newest"
    outlines.on_outline("n3", peer.OutlineDigest(5, "default", 2, Stamp(3, 9), "a" * 32))
    outlines.on_outline("n4", peer.OutlineDigest(5, "default", 2, Stamp(3, 10), "b" * 32))
    digests = [outlines.find("default", 2, Stamp(3, v)) for v in (8, 9, 10)]
    assert [k and k.digest for k in digests] == ["", "a" * 32, ""], "its home alone knows it"


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        ("n4", {}),
        ("n9", {}),
        ("n3", {"round": 4}),
        ("n3", {"stamp": Stamp(2, 7)}),
        ("n3", {"key": "0" * 32}),
        ("n3", {"directory": b""}),
    ],
    ids=["another node's shard", "a stranger", "another round", "another epoch", "another key", "no directory"],
)
def test_what_is_not_kept(host: str, changes: dict[str, Any]) -> None:
    outlines = kept(Here())
    outlines.on_outline(host, outline(**changes))
    assert outlines.find("default", 2, Stamp(3, 7)) is None and not outlines.list_without_holders({"n3", "n4"})


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_bytes": LAYOUT.total + 4096},
        {"areas": (AREAS[0], AREAS[1], 1 << 49)},
        {"areas": (AREAS[0] + 1, AREAS[1], AREAS[2])},
        {"small": b"x" * 5000},
        {"directory": b"no directory", "key": xxhash.xxh3_128(b"no directory").hexdigest()},
    ],
    ids=["larger slot", "absurd area", "other directory", "too much small state", "noise"],
)
def test_what_does_not_fit_together_fills_nothing(changes: dict[str, Any]) -> None:
    outlines = kept(Here())
    outlines.on_outline("n3", outline(**changes))
    found = outlines.find("default", 2, Stamp(3, 7))
    assert found is not None
    with pytest.raises(ValueError, match=r"."):
        found.fill(memoryview(bytearray(LAYOUT.total)))


def test_what_is_told_when_the_slot_is_complete_comes_with_its_digest() -> None:
    """Ranks tell of their outlines in a thread of its own, which the copy may overtake."""
    here = Here()
    outlines = Outlines(made_context(here, "n3", spawn=spawn))
    shard = Shard("default", 2, 4, 2, LAYOUT.total, [Memfd("test", LAYOUT.total, slot=True) for _ in range(2)])
    try:
        with shard.memory[0].view() as view:
            view[LAYOUT.manifest_offset : LAYOUT.manifest_offset + len(DIRECTORY)] = DIRECTORY
            view[LAYOUT.small_offset : LAYOUT.small_offset + len(SMALL)] = SMALL
        slot = shard.pair.slots[0]
        slot.state, slot.stamp, slot.digest, slot.bytes_used = "complete", Stamp(3, 7), "d" * 32, LAYOUT.total
        outlines.record_live_nodes("default", 2, (0, 1))
        outlines.on_written(shard, 0, len(SMALL), AREAS, UNCOUNTED)
    finally:
        for memory in shard.memory:
            memory.close()
    told = [(host, type(message).__name__) for host, message in here.sent]
    assert sorted(told) == [(n, k) for n in ("n1", "n2") for k in ("Outline", "OutlineDigest")]


def test_orphans_are_shards_whose_holders_are_all_dead() -> None:
    outlines = kept(Here())
    outlines.on_outline("n3", outline())
    assert not outlines.list_without_holders({"n3"}) and not outlines.list_without_holders({"n2", "n4"})
    assert outlines.list_without_holders({"n3", "n4"}) == [("default", 2)]


def test_messages_have_bounds() -> None:
    sent = protocol.encode(outline())
    assert protocol.decoder.decode(sent) == outline()
    for changes in ({"small": b"x" * (peer.MAX_SMALL_BYTES + 1)}, {"key": "../../x"}, {"training": "/etc"}):
        with pytest.raises(msgspec.MsgspecError):
            protocol.decoder.decode(protocol.encode(outline(**changes)))
