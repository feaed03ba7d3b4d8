"""The acknowledgements of arriving bytes: cumulative, so that neither end wakes up for each chunk."""

from __future__ import annotations

from gemini_hpc import clock
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import BlockingLink

# More bytes, or an older byte, are acknowledged although more bytes follow at once. The home counts what is not
# acknowledged as being on the network, and its windows have some 10 ms.
_MOST_BYTES, _MOST_S = 16 << 20, 0.002


class Receipts:
    """The acknowledgements of the bytes of one version on one connection."""

    def __init__(self, link: BlockingLink) -> None:
        self._link = link
        self._arrived = self._acknowledged = 0
        self._since = 0.0  # arrival of the first byte that is not acknowledged

    def add(self, count: int) -> None:
        """Record that this many bytes have arrived."""
        now = clock.monotonic()
        if self._arrived == self._acknowledged:
            self._since = now
        self._arrived += count
        if self._arrived - self._acknowledged >= _MOST_BYTES or now - self._since >= _MOST_S:
            self.acknowledge()

    def wait(self) -> None:
        """Wait for the next message. If none is there yet, all bytes are acknowledged before."""
        if self._arrived != self._acknowledged and not self._link.wait(0):
            self.acknowledge()
        self._link.wait(None)

    def acknowledge(self) -> None:
        """Acknowledge all bytes that have arrived.

        Raises:
            OSError: The connection fails.
        """
        if self._arrived != self._acknowledged:
            self._acknowledged = self._arrived
            self._link.send(peer.PushAck(self._arrived))
