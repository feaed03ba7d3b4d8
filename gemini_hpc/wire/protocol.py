"""All messages on a link between two machines, with their decoder and encoder."""

from __future__ import annotations

from functools import reduce
from operator import or_

import msgspec

from gemini_hpc.wire import controller, evacuate, flush, inspect_schema, peer
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.message import Message

_KINDS = [
    kind
    for module in (controller, evacuate, flush, inspect_schema, peer)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
]
AnyMessage = Message  # of one of these kinds, as the decoder returns it

decoder: Strict[AnyMessage] = Strict(msgspec.msgpack.Decoder(reduce(or_, _KINDS)))
encode = msgspec.msgpack.Encoder().encode
