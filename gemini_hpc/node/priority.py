"""The priority of threads that work beside a training."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

NICE = 10  # a tenth of the weight of a thread of the training on the same core


def lower() -> None:
    """Give the calling thread, and the threads that it starts, a lower priority than the training's."""
    thread = threading.get_native_id()
    with suppress(OSError):  # the thread has a lower priority already
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
