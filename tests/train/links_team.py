"""Teams of processes that are connected by links over gloo."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .launch import Process, environments
from .links_scenarios import HANG_S

START_S = 90.0  # torch's import, many times at once on two cores
ANSWER_S = HANG_S + 10.0


class TeamFailed(AssertionError):
    """The words of at least one rank that failed, or its hang."""


class Team:
    """Connected processes that do what they are told, all the same at the same time."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._directory = tempfile.mkdtemp(prefix="team-")
        path = f"{self._directory}/control"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(world)
        self._members = [
            Process(env, {"program": "tests.train.links_rank", "links": path}) for env in environments(world)
        ]
        self._streams: list[Any] = []
        self.pids: list[int] = []

    def connect(self) -> None:
        """Wait until all have come. Raises TeamFailed."""
        deadline = time.monotonic() + START_S
        found: dict[int, tuple[Any, int]] = {}
        while len(found) < self.world:
            self._listener.settimeout(0.5)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                ended = any(code is not None for code in self._codes(0.0))
                if ended or time.monotonic() > deadline:
                    raise TeamFailed(f"the team has not started:\n{self.words()}") from None
                continue
            connection.settimeout(ANSWER_S)
            stream = connection.makefile("rw")
            connection.close()
            hello = json.loads(stream.readline())
            found[hello["rank"]] = stream, hello["pid"]
        self._streams = [found[rank][0] for rank in range(self.world)]
        self.pids = [found[rank][1] for rank in range(self.world)]

    def tell(self, scenario: str, **arguments: Any) -> None:
        """Begin a scenario on all ranks."""
        if not self._streams:
            self.connect()
        command = json.dumps({"scenario": scenario, "arguments": arguments})
        for stream in self._streams:
            stream.write(command + "\n")
            stream.flush()

    def hear(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the results of the scenario on these ranks. Raises TeamFailed."""
        values, failures = [], []
        for rank in range(self.world) if ranks is None else ranks:
            try:
                line = self._streams[rank].readline()
            except (TimeoutError, ConnectionError) as error:
                line = ""
                failures.append(f"rank {rank}: {error or type(error).__name__}")
            answer = json.loads(line) if line else {"error": "no answer"}
            values.append(answer.get("value"))
            if "error" in answer:
                failures.append(f"rank {rank}: {answer['error']}")
        if failures:
            self._kill()
            raise TeamFailed("\n".join([*failures, self.words()]))
        return values

    def run(self, scenario: str, **arguments: Any) -> list[Any]:
        """All of it: what it returns, by rank; the links end on every rank when it is over on all of them."""
        self.tell(scenario, **arguments)
        values = self.hear()
        self.tell("over")
        self.hear()
        return values

    def hang_up(self) -> list[int | None]:
        """The end, in peace. Exit codes."""
        if not self._streams:
            with suppress(TeamFailed):
                self.connect()
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        codes = self._codes(20.0)
        self.close()
        return codes

    def close(self) -> None:
        """Whatever is left ends."""
        if None in self._codes(0.0):
            self._kill()
            self._codes(10.0)
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def words(self) -> str:
        """Return all output of the ranks."""
        return "\n".join(text for p in self._members for text in p.read())

    def _codes(self, timeout_s: float) -> list[int | None]:
        """Exit codes; None for one that has not ended in time."""
        deadline = time.monotonic() + timeout_s
        return [p.wait(max(0.0, deadline - time.monotonic())) for p in self._members]

    def _kill(self) -> None:
        for process in self._members:
            process.signal(signal.SIGKILL)
