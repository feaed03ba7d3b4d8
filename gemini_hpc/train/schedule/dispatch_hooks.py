"""Python kernels before every operation of torch's process groups, without user code.

Each call of a `ProcessGroup`, from Python or C++, goes through an operator `c10d::...` of torch's dispatcher. The key
BackendSelect is free there: a kernel under this key sees the call and redispatches it. Traffic that is handed to a
backend object (`group._get_backend(device).send(...)`), as ours is, bypasses these kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_KEY = "BackendSelect"
_GROUP, _TENSOR = "torch.classes.c10d.ProcessGroup", "Tensor"
_PEERS = ("dst", "src")


class Occupied(RuntimeError):
    """The error for kernels of another library under the same key, which ours would replace silently."""


class Signature(NamedTuple):
    """The positions of an operator's arguments; a call may omit trailing arguments that equal their defaults."""

    name: str
    group_at: int
    tensors_at: tuple[int, ...]
    async_at: int | None  # position of async_op, which is True by default
    peer_at: int | None = None  # position of the peer rank of a message

    def is_asynchronous(self, args: tuple[Any, ...]) -> bool:
        """Return whether the call is asynchronous; otherwise the caller waits at once."""
        return self.async_at is None or len(args) <= self.async_at or bool(args[self.async_at])

    def find_tensor(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return any tensor of the operation (all are on one device), or None."""
        for at in self.tensors_at:
            found = args[at]
            while type(found) is list and found:
                found = found[0]
            if type(found) is not list:
                return found  # type: ignore[no-any-return]
        return None

    def count_payload_bytes(self, args: tuple[Any, ...]) -> int:
        """Return the larger of this rank's input and output bytes. A barrier's tensor counts as 0."""
        if "barrier" in self.name:
            return 0
        most = 0
        for at in self.tensors_at:
            most = max(most, _count_bytes(args[at]))
        return most


def _count_bytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if type(tensors) is not list:
        return tensors.nbytes  # type: ignore[no-any-return]
    size_bytes = 0
    for tensor in tensors:
        size_bytes += _count_bytes(tensor) if type(tensor) is list else tensor.nbytes
    return size_bytes


# Called before an operation; its result is passed to the After callback.
Before = Callable[[Signature, tuple[Any, ...]], Any]
# Called in the same thread as soon as the operation is launched, with its result; not if the operation raised.
After = Callable[[Signature, tuple[Any, ...], Any, Any], None]


class Dispatch:
    """An observer of each operation, from construction to `remove()`.

    Neither callback may raise: that would end the training's collective. Several observers of one process (of two
    trainings, say) share the kernels. No other thread should be inside a collective while kernels are installed or
    removed.
    """

    def __init__(self, before: Before, after: After) -> None:
        """Install the kernels if needed, and observe from now on.

        Args:
            before: Called before each operation.
            after: Called after each launch.

        Raises:
            Occupied: If another library has kernels there.
        """
        self.before, self.after = before, after
        _kernels.add(self)

    def remove(self) -> None:
        """Stop observing. After the last observer's removal all operators are as they were before."""
        _kernels.remove(self)


class _Kernels:
    """The kernels of this process, installed while there is an observer."""

    def __init__(self) -> None:
        self.looks: tuple[Dispatch, ...] = ()
        self._library: Any = None
        self._lock = threading.Lock()

    def add(self, look: Dispatch) -> None:
        """Add an observer, and install the kernels before the first.

        Raises:
            Occupied: If another library has kernels there.
        """
        with self._lock:
            if not self.looks:
                self._install_kernels()
            self.looks = (*self.looks, look)

    def remove(self, look: Dispatch) -> None:
        """Remove an observer; may be called twice."""
        with self._lock:
            self.looks = tuple(other for other in self.looks if other is not look)
            if not self.looks and self._library is not None:
                self._library._destroy()
                self._library = None

    def _install_kernels(self) -> None:
        library: Any = torch.library.Library  # without types
        self._library = library("c10d", "IMPL")
        try:
            found = list_operators()
            if not found:
                raise RuntimeError("this torch has no operator of namespace c10d that takes a process group")
            for name, _, _ in found:
                if torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY):
                    raise Occupied(f"{name} has another {_KEY} kernel already")
            for name, op, signature in found:
                self._library.impl(name, _build_kernel(op, signature), _KEY, with_keyset=True)
        except BaseException:
            self._library._destroy()
            self._library = None
            raise


_kernels = _Kernels()


def list_operators() -> list[tuple[str, Any, Signature]]:
    """Return the name, overload and signature of each c10d operator that takes a process group.

    torch is queried because the operators differ from version to version.
    """
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        types = [_name_element_type(argument.type) for argument in schema.arguments]
        groups = [i for i, kind in enumerate(types) if kind.endswith(_GROUP)]
        if namespace != "c10d" or not groups:
            continue
        names = [argument.name for argument in schema.arguments]
        signature = Signature(
            name,
            groups[0],
            tuple(i for i, kind in enumerate(types) if kind == _TENSOR),
            names.index("async_op") if "async_op" in names else None,
            next((names.index(peer) for peer in _PEERS if name in ("send", "recv_") and peer in names), None),
        )
        op = getattr(getattr(torch.ops.c10d, name), schema.overload_name or "default")
        found.append((f"{schema.name}.{schema.overload_name}".rstrip("."), op, signature))
    return found


def _name_element_type(kind: Any) -> str:
    """Return the name of a type, or of the element type of nested lists."""
    while kind.kind() == "ListType":
        kind = kind.getElementType()
    return str(kind)


def _build_kernel(op: Any, signature: Signature) -> Callable[..., Any]:
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = op.redispatch

    def run_kernel(keyset: Any, *args: Any) -> Any:
        looks = _kernels.looks
        begun = [look.before(signature, args) for look in looks]
        result = redispatch(keyset & below, *args)
        for look, begin in zip(looks, begun, strict=True):
            look.after(signature, args, result, begin)
        return result

    disabled: Callable[..., Any] = torch.compiler.disable(run_kernel)  # type: ignore[no-untyped-call]
    return disabled  # Dynamo traces frames beside compiled code as well, and would warn of this one
