"""Frames of a session: whatever is altered, lost, repeated, reordered or sent back is refused."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.wire.frames import (
    LENGTH_BYTES,
    MAC_BYTES,
    MAX_FRAME_BYTES,
    FrameError,
    Sealer,
    pack_bare,
    parse_length,
    read_bare,
    read_exact,
)

KEY, OTHER = b"k" * 32, b"o" * 32
payloads = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def bodies(sent: list[bytes], key: bytes = KEY) -> list[bytes]:
    sealer = Sealer(key)
    return [sealer.seal(p)[LENGTH_BYTES:] for p in sent]


@given(payloads)
def test_what_is_sealed_opens_in_order(sent: list[bytes]) -> None:
    opener = Sealer(KEY)
    assert [opener.open(b) for b in bodies(sent)] == sent


@given(payloads, st.data())
def test_any_changed_bit_is_refused(sent: list[bytes], data: st.DataObject) -> None:
    frames, opener = bodies(sent), Sealer(KEY)
    n = data.draw(st.integers(0, len(frames) - 1))
    at = data.draw(st.integers(0, len(frames[n]) * 8 - 1))
    bad = bytearray(frames[n])
    bad[at // 8] ^= 1 << at % 8
    for frame in frames[:n]:
        opener.open(frame)
    with pytest.raises(FrameError, match="not authentic"):
        opener.open(bytes(bad))


@given(payloads, st.data())
def test_cut_short_or_lengthened_is_refused(sent: list[bytes], data: st.DataObject) -> None:
    (frame,), opener = bodies(sent[:1]), Sealer(KEY)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(FrameError):
        opener.open(frame[:cut])
    with pytest.raises(FrameError):
        Sealer(KEY).open(frame + b"\0")


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=2, max_size=6, unique=True), st.data())
def test_repeated_reordered_or_dropped_is_refused(sent: list[bytes], data: st.DataObject) -> None:
    frames = bodies(sent)
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), min_size=1, max_size=8))
    opener = Sealer(KEY)
    for position, index in enumerate(order):
        if index == position:
            assert opener.open(frames[index]) == sent[index]
            continue
        with pytest.raises(FrameError, match="not authentic"):
            opener.open(frames[index])
        break


def test_the_same_payload_twice_is_two_frames() -> None:
    first, second = bodies([b"same", b"same"])
    assert first != second


@given(st.binary(max_size=60))
def test_reflected_or_of_another_session_is_refused(payload: bytes) -> None:
    (frame,) = bodies([payload])
    with pytest.raises(FrameError, match="not authentic"):
        Sealer(OTHER).open(frame)


@given(st.binary(min_size=LENGTH_BYTES, max_size=LENGTH_BYTES), st.integers(0, MAX_FRAME_BYTES))
def test_lengths(head: bytes, limit: int) -> None:
    wanted = struct.unpack(">I", head)[0]
    if wanted <= limit:
        assert parse_length(head, limit) == wanted
    else:
        with pytest.raises(FrameError, match=f"{wanted} bytes, at most {limit}"):
            parse_length(head, limit)


def test_default_limit() -> None:
    assert parse_length(struct.pack(">I", MAX_FRAME_BYTES)) == MAX_FRAME_BYTES
    with pytest.raises(FrameError):
        parse_length(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_too_long_a_message_is_refused_by_the_sender() -> None:
    sealer = Sealer(KEY)
    with pytest.raises(FrameError, match="too long"):
        sealer.seal(bytes(MAX_FRAME_BYTES - MAC_BYTES + 1))
    assert Sealer(KEY).open(sealer.seal(b"next")[LENGTH_BYTES:]) == b"next", "and costs no number"


def test_reading_from_a_socket() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    with ours, theirs:
        for byte in pack_bare(b"slowly"):
            theirs.send(bytes([byte]))
        assert read_bare(ours, 100) == b"slowly"
        theirs.send(struct.pack(">I", 101))
        with pytest.raises(FrameError, match="101"):
            read_bare(ours, 100)
        theirs.send(pack_bare(b"cut")[:-1])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(FrameError, match="mid-frame"):
            read_bare(ours, 100)
        with pytest.raises(FrameError, match="mid-frame"):
            read_exact(ours, 1)


def test_reading_ends_in_time() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    with ours, theirs, pytest.raises(TimeoutError):
        read_exact(ours, 1)
