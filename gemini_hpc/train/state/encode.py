"""Typed binary encoding of plain Python state: scheduler dicts, RNG tuples, loader positions. No pickle.

Every value is one tag byte and a payload. Sizes are 4-byte (counts) or 8-byte (bytes) little-endian words. Decoding
returns the encoded value, bit for bit for floats and arrays, with the same types. The decoder never runs code that
the data names. It never allocates more than the data's own length asks for. Hostile bytes end in ValueError.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import io
import math
import re
import struct
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from gemini_hpc.format.small_state import EncodedReader
from gemini_hpc.train.state.tensors import copy_bytes

MAX_DEPTH = 64

_COUNT = struct.Struct("<I")
_SIZE = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_TIMEDELTA = struct.Struct("<qqq")

_ARRAY_DTYPE = re.compile(r"[<>|=]?(?:[biufcSU?][0-9]*|[mM]8(?:\[[0-9]*[A-Za-z]+\])?)")
_TORCH_DTYPES: dict[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_QUANTIZED = ("torch.q", "torch.quint", "torch.bits")


class UnknownTypeError(TypeError):
    """A value that has no encoding; the message gives its place and its type."""


class Lifted(NamedTuple):
    """A reference to a tensor that lies elsewhere in the slot, under this name; see `lifted`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    cuda: bool


class DTensorPart(NamedTuple):
    """A rank's part of a DTensor with this shape and these placements; see `sharded`."""

    tensor: torch.Tensor | Lifted
    shape: tuple[int, ...]
    placements: str


def encode(value: Any, where: str = "state") -> bytes:
    """Return the encoded bytes of `value`.

    Args:
        value: The value.
        where: Name of the value in error messages.

    Raises:
        UnknownTypeError: A value in it has no encoding. The message has its path below `where` and its type.
    """
    out: list[bytes] = []
    _put_value(out, value, where, 0)
    return b"".join(out)


class Gaps(NamedTuple):
    """The places in encoded bytes that have zeros for now, and the content for them.

    Attributes:
        data: The encoded bytes.
        content: The missing bytes, one tensor after the other.
        places: (offset, size) in `data` of each tensor.
    """

    data: bytearray
    content: torch.Tensor  # uint8, on the tensors' device
    places: list[tuple[int, int]]

    def fill(self, content: torch.Tensor) -> None:
        """Put the content, now on the host, into its places."""
        brought, at = content.numpy().data, 0
        for offset, size in self.places:
            self.data[offset : offset + size] = brought[at : at + size]
            at += size


def encode_around(
    value: Any, defers: Callable[[torch.Tensor], bool], where: str = "state"
) -> tuple[bytes | bytearray, Gaps | None]:
    """Encode a value without waiting for tensors that are on a device.

    Those tensors are copied on the device, and the bytes have gaps to be filled later.

    Args:
        value: The value.
        defers: Returns whether a tensor is deferred. All deferred tensors are on the same device.
        where: Name of the value in error messages.

    Returns:
        The bytes, and the gaps in them or None.

    Raises:
        UnknownTypeError: A value in it has no encoding.
    """
    out = _Around(defers)
    _put_value(out, value, where, 0)
    if not out.deferred:
        return b"".join(out), None
    data, starts = bytearray(b"".join(out)), list(accumulate(map(len, out), initial=0))
    places = [(starts[number], flat.numel()) for number, flat in out.deferred]
    return data, Gaps(data, torch.cat([flat for _, flat in out.deferred]), places)


def decode(data: bytes | memoryview, *, enums: bool = True) -> Any:
    """Return the value that `encode` was given.

    Tensors that came from a CUDA device go to the current one, if there is one.

    Args:
        data: The encoded bytes.
        enums: False decodes an enum member to the text `CLASS.NAME`, for readers without the training's classes.

    Raises:
        ValueError: `encode` cannot have made these bytes.
    """
    reader = _Reader(memoryview(data), enums)
    try:
        value = reader.read_value(0)
    except (struct.error, UnicodeError, OverflowError, RuntimeError, TypeError, KeyError) as error:
        raise ValueError(f"encoded state is damaged: {error}") from error
    if reader.at != len(reader.data):
        raise ValueError(f"encoded state has {len(reader.data) - reader.at} bytes after its end")
    return value


# ---- encoding ------------------------------------------------------------------------------------------


class _Around(list[bytes]):
    """Parts of encoded bytes, with zeros for tensors that are filled in later."""

    def __init__(self, defers: Callable[[torch.Tensor], bool]) -> None:
        self.defers = defers
        self.deferred: list[tuple[int, torch.Tensor]] = []  # by number of the part


def _put_sized(out: list[bytes], tag: bytes, payload: bytes) -> None:
    out += (tag, _SIZE.pack(len(payload)), payload)


def _put_items(out: list[bytes], tag: bytes, items: Sequence[Any], where: str, depth: int) -> None:
    out += (tag, _COUNT.pack(len(items)))
    for index, item in enumerate(items):
        _put_value(out, item, f"{where}[{index}]", depth + 1)


def _put_mapping(out: list[bytes], tag: bytes, value: dict[Any, Any], where: str, depth: int) -> None:
    out += (tag, _COUNT.pack(len(value)))
    for key, item in value.items():
        _put_value(out, key, f"{where} (key {key!r})", depth + 1)
        _put_value(out, item, f"{where}[{key!r}]", depth + 1)


def _put_set(out: list[bytes], tag: bytes, value: Collection[Any], where: str, depth: int) -> None:
    members: list[bytes] = []
    for item in value:
        member: list[bytes] = []
        _put_value(member, item, f"{where}{{{item!r}}}", depth + 1)
        members.append(b"".join(member))
    out += (tag, _COUNT.pack(len(members)), *sorted(members))


def _put_int(out: list[bytes], value: int) -> None:
    _put_sized(out, b"i", value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True))


def _put_array(out: list[bytes], tag: bytes, name: str, shape: Sequence[int], payload: bytes) -> None:
    text = name.encode()
    out += (tag, _COUNT.pack(len(text)), text, _COUNT.pack(len(shape)), *map(_SIZE.pack, shape))
    out += (_SIZE.pack(len(payload)), payload)


def _put_tensor(out: list[bytes], value: torch.Tensor, where: str) -> None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnknownTypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}: only plain tensors can be captured "
            "as small state. Give the module that holds it as `model=` or in `extra=`."
        )
    if value.layout != torch.strided or value.is_quantized or str(value.dtype).startswith(_QUANTIZED):
        raise UnknownTypeError(f"{where} is a {value.layout} tensor of {value.dtype}: only dense ones are captured")
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    out.append(b"g" if value.device.type == "cuda" else b"c")
    if isinstance(out, _Around) and flat.numel() and out.defers(value):
        _put_array(out, b"X", str(value.dtype), value.shape, bytes(flat.numel()))
        out.deferred.append((len(out) - 1, flat))
    else:
        _put_array(out, b"X", str(value.dtype), value.shape, copy_bytes(flat))


def _put_ndarray(out: list[bytes], tag: bytes, value: np.ndarray[Any, Any], where: str) -> None:
    name = value.dtype.str
    if not _ARRAY_DTYPE.fullmatch(name):
        raise UnknownTypeError(f"{where} is a NumPy value of dtype {value.dtype}: only numbers, text and times")
    _put_array(out, tag, name, value.shape, value.tobytes())


_EXACT: dict[type, Callable[[list[bytes], Any, str, int], None]] = {
    type(None): lambda out, value, where, depth: out.append(b"N"),
    bool: lambda out, value, where, depth: out.append(b"T" if value else b"F"),
    int: lambda out, value, where, depth: _put_int(out, value),
    float: lambda out, value, where, depth: out.append(b"f" + _FLOAT.pack(value)),
    complex: lambda out, value, where, depth: out.append(b"j" + _COMPLEX.pack(value.real, value.imag)),
    str: lambda out, value, where, depth: _put_sized(out, b"s", value.encode("utf-8", "surrogatepass")),
    bytes: lambda out, value, where, depth: _put_sized(out, b"b", value),
    bytearray: lambda out, value, where, depth: _put_sized(out, b"B", bytes(value)),
    io.BytesIO: lambda out, value, where, depth: _put_sized(out, b"I", value.getvalue()),
    list: lambda out, value, where, depth: _put_items(out, b"l", value, where, depth),
    tuple: lambda out, value, where, depth: _put_items(out, b"t", value, where, depth),
    torch.Size: lambda out, value, where, depth: _put_items(out, b"z", value, where, depth),
    range: lambda out, v, where, depth: _put_items(out, b"r", (v.start, v.stop, v.step), where, depth),
    deque: lambda out, value, where, depth: _put_items(out, b"q", (value.maxlen, *value), where, depth),
    dict: lambda out, value, where, depth: _put_mapping(out, b"d", value, where, depth),
    OrderedDict: lambda out, value, where, depth: _put_mapping(out, b"O", value, where, depth),
    argparse.Namespace: lambda out, value, where, depth: _put_mapping(out, b"n", vars(value), where, depth),
    Counter: lambda out, value, where, depth: _put_mapping(out, b"C", value, where, depth),
    set: lambda out, value, where, depth: _put_set(out, b"S", value, where, depth),
    frozenset: lambda out, value, where, depth: _put_set(out, b"Z", value, where, depth),
    DTensorPart: lambda out, value, where, depth: _put_items(out, b"P", value, where, depth),
    Lifted: lambda out, value, where, depth: _put_items(out, b"L", value, where, depth),
    torch.dtype: lambda out, value, where, depth: _put_sized(out, b"D", str(value).encode()),
    torch.device: lambda out, value, where, depth: _put_sized(out, b"v", str(value).encode()),
    datetime.datetime: lambda out, value, where, depth: _put_datetime(out, value, where),
    datetime.date: lambda out, value, where, depth: _put_sized(out, b"y", value.isoformat().encode()),
    datetime.timedelta: lambda out, value, where, depth: out.append(
        b"e" + _TIMEDELTA.pack(value.days, value.seconds, value.microseconds)
    ),
}


def _find_enum_class(name: str) -> type[enum.Enum] | None:
    """Return the enum class of this module and name; None if this process has no such class.

    Nothing is imported, and no code of a module or class runs, because the name may come from damaged or hostile
    bytes.
    """
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:split]))
        found: Any = module if isinstance(module, types.ModuleType) else None
        for part in parts[split:]:
            found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
        if (
            isinstance(found, type)
            and issubclass(found, enum.Enum)
            and f"{found.__module__}.{found.__qualname__}" == name
        ):
            return found
    return None


def _has_name(value: enum.Enum) -> bool:
    """Return whether a reader can find this member by its names. A combination of flags has no name."""
    cls = type(value)
    known = _find_enum_class(f"{cls.__module__}.{cls.__qualname__}") is cls
    return known and cls.__members__.get(value.name or "") is value


def _put_datetime(out: list[bytes], value: datetime.datetime, where: str) -> None:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise UnknownTypeError(f"{where} is a datetime in a {type(value.tzinfo).__name__}: only fixed UTC offsets")
    _put_sized(out, b"w", (value.isoformat() + "~" * value.fold).encode())


def _put_value(out: list[bytes], value: Any, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise UnknownTypeError(f"{where} is nested deeper than {MAX_DEPTH} levels (does it contain itself?)")
    put = _EXACT.get(type(value))
    if put is not None:
        put(out, value, where, depth)
    elif isinstance(value, torch.Tensor):
        _put_tensor(out, value, where)
    elif isinstance(value, torch.Generator):
        _put_sized(out, b"G", value.get_state().cpu().numpy().tobytes())
    elif isinstance(value, np.generic):
        _put_ndarray(out, b"a", np.asarray(value), where)
    elif type(value) is np.ndarray:
        _put_ndarray(out, b"A", value, where)
    elif isinstance(value, enum.Enum) and _has_name(value):
        out.append(b"E")
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        _put_value(out, (name, value.name), where, depth + 1)
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        hint = (
            "define its class at the top of a module"
            if isinstance(value, enum.Enum)
            else "give the object that holds it a state_dict of plain values (numbers, text, containers, tensors)"
        )
        raise UnknownTypeError(f"{where} is a {kind}, which cannot be captured: {hint}")


# ---- decoding ------------------------------------------------------------------------------------------


class GeneratorState(bytes):
    """The decoded state of a `torch.Generator`. `restore(generator)` puts it into a generator."""

    def restore(self, generator: torch.Generator) -> None:
        """Set the generator's state."""
        generator.set_state(torch.frombuffer(bytearray(self), dtype=torch.uint8))


class _Reader(EncodedReader):
    def __init__(self, data: memoryview, enums: bool) -> None:
        super().__init__(data)
        self.enums = enums

    def read_value(self, depth: int) -> Any:
        if depth > MAX_DEPTH + 1:
            raise ValueError(f"encoded state is nested deeper than {MAX_DEPTH} levels")
        tag = bytes(self.read_bytes(1))
        read = _READ.get(tag)
        if read is None:
            raise ValueError(f"encoded state has an unknown tag {tag!r}")
        return read(self, depth)

    def read_items(self, depth: int) -> list[Any]:
        return [self.read_value(depth + 1) for _ in range(self.read_count())]

    def read_mapping(self, depth: int) -> dict[Any, Any]:
        count = self.read_count()
        result: dict[Any, Any] = {}
        for _ in range(count):
            key = self.read_value(depth + 1)
            result[key] = self.read_value(depth + 1)
        if len(result) != count:
            raise ValueError("encoded state has a key twice")
        return result

    def read_namespace(self, depth: int) -> argparse.Namespace:
        found = argparse.Namespace()
        for key, value in self.read_mapping(depth).items():
            if not isinstance(key, str):
                raise ValueError("encoded state has a namespace with a name that is no text")
            vars(found)[key] = value
        return found

    def read_tensor(self, cuda: bool) -> torch.Tensor:
        if bytes(self.read_bytes(1)) != b"X":
            raise ValueError("encoded state has a tensor without a body")
        name, shape, payload = self.read_array()
        dtype = _TORCH_DTYPES.get(name)
        if dtype is None or name.startswith(_QUANTIZED):
            raise ValueError(f"encoded state has a tensor of unknown dtype {name[:40]!r}")
        if math.prod(shape) * dtype.itemsize != len(payload):
            raise ValueError(f"encoded state has a tensor of shape {shape} in {len(payload)} bytes")
        if not len(payload):
            result = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            # a copy: its memory is its own and can be resized
            result = torch.frombuffer(bytearray(payload), dtype=torch.uint8).clone().view(dtype).reshape(shape)
        return result.to("cuda") if cuda and torch.cuda.is_available() else result

    def read_part(self, depth: int) -> DTensorPart:
        found = self.read_items(depth)
        kinds: tuple[Any, ...] = ((torch.Tensor, Lifted), tuple, str)
        if len(found) != 3 or not all(map(isinstance, found, kinds)):
            raise ValueError("encoded state has an invalid part of a DTensor")
        return DTensorPart(*found)

    def read_lifted(self, depth: int) -> Lifted:
        found = self.read_items(depth)
        if [type(value) for value in found] != [str, str, tuple, bool]:
            raise ValueError("encoded state has an invalid reference to a tensor elsewhere")
        if f"torch.{found[1]}" not in _TORCH_DTYPES or not all(type(n) is int and n >= 0 for n in found[2]):
            raise ValueError(f"encoded state refers to a tensor {str(found[2])[:40]} of {found[1][:40]!r}")
        return Lifted(*found)

    def read_ndarray(self) -> np.ndarray[Any, Any]:
        name, shape, payload = self.read_array()
        if not _ARRAY_DTYPE.fullmatch(name):
            raise ValueError(f"encoded state has an array of dtype {name[:40]!r}")
        dtype = np.dtype(name)
        if math.prod(shape) * dtype.itemsize != len(payload):
            raise ValueError(f"encoded state has an array of shape {shape} in {len(payload)} bytes")
        if not len(payload):
            return np.empty(shape, dtype)
        found = np.empty(shape, dtype)  # its memory is its own and can be resized
        found.reshape(-1).view(np.uint8)[:] = np.frombuffer(payload, np.uint8)
        return found

    def read_scalar(self) -> Any:
        array = self.read_ndarray()
        if array.ndim:
            raise ValueError("encoded state has a NumPy scalar with dimensions")
        return array[()]

    def read_range(self, depth: int) -> range:
        start, stop, step = self.read_items(depth)
        return range(start, stop, step)

    def read_deque(self, depth: int) -> deque[Any]:
        maxlen, *items = self.read_items(depth)
        return deque(items, maxlen)

    def read_members(self, depth: int) -> set[Any]:
        items = self.read_items(depth)
        result = set(items)
        if len(result) != len(items):
            raise ValueError("encoded state has a set member twice")
        return result

    def read_enum(self, depth: int) -> enum.Enum | str:
        pair = self.read_value(depth + 1)
        if not self.enums and isinstance(pair, tuple) and len(pair) == 2:
            return f"{pair[0]}.{pair[1]}"
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError("encoded state has an invalid member of an enum")
        found = _find_enum_class(pair[0])
        if found is None or pair[1] not in found.__members__:
            raise ValueError(
                f"encoded state has {pair[0][:80]}.{str(pair[1])[:80]}, an enum's member that is unknown here"
            )
        return found.__members__[pair[1]]

    def read_datetime(self) -> datetime.datetime:
        text = bytes(self.read_sized()).decode()
        plain = text.removesuffix("~")
        return datetime.datetime.fromisoformat(plain).replace(fold=len(text) - len(plain))


_READ: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda r, depth: None,
    b"T": lambda r, depth: True,
    b"F": lambda r, depth: False,
    b"i": lambda r, depth: int.from_bytes(r.read_sized(), "little", signed=True),
    b"f": lambda r, depth: _FLOAT.unpack(r.read_bytes(8))[0],
    b"j": lambda r, depth: complex(*_COMPLEX.unpack(r.read_bytes(16))),
    b"s": lambda r, depth: bytes(r.read_sized()).decode("utf-8", "surrogatepass"),
    b"b": lambda r, depth: bytes(r.read_sized()),
    b"B": lambda r, depth: bytearray(r.read_sized()),
    b"I": lambda r, depth: io.BytesIO(r.read_sized()),
    b"l": lambda r, depth: r.read_items(depth),
    b"t": lambda r, depth: tuple(r.read_items(depth)),
    b"z": lambda r, depth: torch.Size(r.read_items(depth)),
    b"r": lambda r, depth: r.read_range(depth),
    b"q": lambda r, depth: r.read_deque(depth),
    b"d": lambda r, depth: r.read_mapping(depth),
    b"O": lambda r, depth: OrderedDict(r.read_mapping(depth)),
    b"n": lambda r, depth: r.read_namespace(depth),
    b"C": lambda r, depth: Counter(r.read_mapping(depth)),
    b"S": lambda r, depth: r.read_members(depth),
    b"Z": lambda r, depth: frozenset(r.read_members(depth)),
    b"D": lambda r, depth: _TORCH_DTYPES[bytes(r.read_sized()).decode()],
    b"v": lambda r, depth: torch.device(bytes(r.read_sized()).decode()),
    b"w": lambda r, depth: r.read_datetime(),
    b"y": lambda r, depth: datetime.date.fromisoformat(bytes(r.read_sized()).decode()),
    b"e": lambda r, depth: datetime.timedelta(*_TIMEDELTA.unpack(r.read_bytes(24))),
    b"P": lambda r, depth: r.read_part(depth),
    b"L": lambda r, depth: r.read_lifted(depth),
    b"G": lambda r, depth: GeneratorState(r.read_sized()),
    b"a": lambda r, depth: r.read_scalar(),
    b"A": lambda r, depth: r.read_ndarray(),
    b"c": lambda r, depth: r.read_tensor(cuda=False),
    b"g": lambda r, depth: r.read_tensor(cuda=True),
    b"E": lambda r, depth: r.read_enum(depth),
}
