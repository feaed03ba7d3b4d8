"""docs/dev/protocol.md, R2: what the seal is for, by looking at every interleaving and every single failure."""

from __future__ import annotations

import pytest
from commit_exhaustive import Protocol, explore

SEAL_BEFORE_STEP = Protocol("step")
SEAL_BEFORE_WRITE = Protocol("write")
NO_SEAL = Protocol("never")
PAIR, RING = (2, 2), (3, 2)
_slow = pytest.mark.slow


@pytest.mark.parametrize("job", [PAIR, RING])
def test_without_a_seal_one_failure_can_lose_everything(job: tuple[int, int]) -> None:
    findings = explore(*job, NO_SEAL, limit=200_000)
    assert findings.lost is not None
    assert "rank 0 completes step 2" in findings.lost  # one rank is a version ahead, and has begun to overwrite
    assert findings.lost[-1].endswith("begins shard 0 of 2")


@pytest.mark.parametrize("job", [PAIR, pytest.param(RING, marks=_slow)])
def test_awaited_before_the_write_two_steps_can_be_repeated(job: tuple[int, int]) -> None:
    findings = explore(*job, SEAL_BEFORE_WRITE, limit=200_000)
    assert findings.lost is None
    assert findings.repeated == 2


@pytest.mark.parametrize("job", [PAIR, pytest.param(RING, marks=_slow), (3, 1)])
def test_awaited_before_the_step_nothing_is_lost_and_one_step_repeated(job: tuple[int, int]) -> None:
    findings = explore(*job, SEAL_BEFORE_STEP, limit=200_000, liveness=True)
    assert findings.states > 500
    assert findings.stuck is None
    if job[1] > 1:
        assert findings.lost is None
        assert findings.repeated == 1


@pytest.mark.parametrize(
    ("job", "j", "s"),
    [
        (PAIR, 2, 1),
        (PAIR, 2, 2),
        (PAIR, 3, 2),
        (PAIR, 3, 3),
        pytest.param(RING, 2, 1, marks=_slow),
        pytest.param(RING, 2, 2, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_saved_every_jth_step_and_awaited_s_steps_later(job: tuple[int, int], j: int, s: int) -> None:
    findings = explore(*job, Protocol("step", every=j, spread=s), limit=1_000_000, liveness=True)
    assert findings.lost is None and findings.stuck is None
    assert findings.repeated == j + s - 1


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=_slow)])
def test_parity_survives_any_one_node_at_any_moment(nodes: int) -> None:
    findings = explore(nodes, nodes, SEAL_BEFORE_STEP, limit=400_000, liveness=True, parity=True)
    assert findings.states > 500 and findings.stuck is None
    assert findings.lost is None and findings.repeated == 1


def test_parity_without_a_seal_is_lost_with_one_node() -> None:
    findings = explore(3, 3, NO_SEAL, limit=400_000, parity=True)
    assert findings.lost is not None


@_slow
def test_parity_blocks_nobody_where_waits_run_out() -> None:
    findings = explore(2, 2, Protocol("step", patience=2), limit=400_000, liveness=True, parity=True)
    assert findings.lost is None and findings.stuck is None and findings.repeated == 2


@_slow
def test_waits_that_run_out_lose_nothing_and_block_nothing() -> None:
    findings = explore(*PAIR, Protocol("step", patience=2), limit=200_000, liveness=True)
    assert findings.lost is None
    assert findings.repeated == 2
    assert findings.stuck is None


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=_slow)])
def test_skipped_versions_block_nobody_for_ever(fresh: bool) -> None:
    findings = explore(2, 1, Protocol("step", patience=3, fresh=fresh), limit=200_000, liveness=True)
    assert findings.stuck is None


def test_without_abandoning_a_voter_is_stuck() -> None:
    findings = explore(2, 1, Protocol("step", patience=3, abandons=False), limit=200_000, liveness=True)
    assert findings.stuck is not None


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("N", "m", "protocol"),
    [
        (3, 3, SEAL_BEFORE_STEP),
        (4, 2, SEAL_BEFORE_STEP),
        (3, 1, Protocol("step", patience=2)),
        (2, 1, Protocol("step", patience=4, fresh=True)),
        (2, 2, Protocol("step", patience=2, fresh=True)),
    ],
)
def test_larger_jobs(N: int, m: int, protocol: Protocol) -> None:
    findings = explore(N, m, protocol, limit=1_000_000, liveness=protocol.patience > 0)
    assert findings.stuck is None
    if m > 1:
        assert findings.lost is None
        assert findings.repeated <= 1
