"""Messages between the ranks of a group, besides tensors: plain data of a fixed form and a bounded size, never a pickle.

A pickle runs what its sender likes. :func:`gather` says what every rank sends, and takes nothing else (msgpack). torch's own object
collectives, which megatron and vLLM use (``all_gather_object``, ``broadcast_object_list``, ...), carry Python literals once
:func:`protect` was called: text, bytes, numbers, and lists, tuples, sets and dicts of them. Everything else is refused where it
would be sent; a save's plans alone are of torch's own classes, and read by a list of their names (:func:`written_by`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Most bytes that one rank sends: fingerprints or shapes of all tensors of a large model."""

AT_ONCE_BYTES = 512
"""Longest content that travels with its length, in one collective."""

LENGTH_BYTES = 8


class NotPlainError(TypeError):
    """A message that was to go over a group, or has come, is no plain data."""


def gather(value: T, kind: Any, group: ProcessGroup) -> list[T]:
    """Return the objects that the ranks of a group send, in their order; collective.

    Args:
        value: this rank's object.
        kind: the type of each rank's value: of built-in types and dataclasses.
        group: a group with gloo for tensors of the host.

    Raises:
        NotPlainError: a value is of another type, or has more than :data:`MOST_BYTES`.
    """
    import torch.distributed as dist

    content = msgspec.msgpack.encode(value)
    first = len(content).to_bytes(LENGTH_BYTES, "big") + content[:AT_ONCE_BYTES]
    heads = [bytes(row.tolist()) for row in _gathered(first, LENGTH_BYTES + AT_ONCE_BYTES, group)]
    lengths = [int.from_bytes(row[:LENGTH_BYTES], "big") for row in heads]
    contents = [row[LENGTH_BYTES:] for row in heads]
    if max(lengths) > MOST_BYTES:
        raise NotPlainError(f"a rank would send {max(lengths):,} bytes; {MOST_BYTES:,} are the most (bytes by rank: {lengths})")
    if max(lengths) > AT_ONCE_BYTES:
        contents = [row.numpy().tobytes() for row in _gathered(content, max(lengths), group)]
    try:
        return [msgspec.msgpack.decode(message[:length], type=kind) for message, length in zip(contents, lengths, strict=True)]
    except msgspec.MsgspecError as error:
        raise NotPlainError(f"rank {dist.get_rank()} of the pool received something other than {kind}: {error}") from error


def _gathered(content: bytes, size: int, group: ProcessGroup) -> list[Tensor]:
    """Return every rank's bytes, filled up with zeros."""
    import torch
    import torch.distributed as dist

    own = torch.zeros(size, dtype=torch.uint8)
    own[: len(content)] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, own, group=group)
    return received


def protect() -> None:
    """Have torch's object collectives in this process carry Python literals."""
    from torch.distributed import distributed_c10d as c10d

    torchs: Any = c10d
    torchs._object_to_tensor, torchs._tensor_to_object = _to_tensor, _to_object


@contextmanager
def written_by(write: Callable[[Any], bytes], read: Callable[[bytes], Any]) -> Iterator[None]:
    """Have torch's object collectives on this thread carry the objects of a library's code that are no Python literals.

    ``read`` must make nothing but what it knows, whatever the bytes are, and raise ValueError or ``pickle.UnpicklingError`` else.
    """
    token = _form.set((write, read))
    try:
        yield
    finally:
        _form.reset(token)


def _literal(value: Any) -> bytes:
    text = repr(value)
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        same = False
    if not same:
        raise NotPlainError(f"{type(value).__name__} is no plain data, and nothing else goes over a group: {text[:200]}")
    return text.encode()


def _value(content: bytes) -> Any:
    return ast.literal_eval(content.decode())


_form: ContextVar[tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = ContextVar("form", default=(_literal, _value))


def _to_tensor(value: Any, device: Any, group: Any) -> tuple[Tensor, Tensor]:
    """Return a value as bytes, and how many; in place of torch's ``_object_to_tensor``."""
    import torch

    content = _form.get()[0](value)
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()  # torch enlarges it
    return tensor.to(device), torch.tensor([len(content)], device=device)


def _to_object(tensor: Tensor, size: Any, group: Any) -> Any:
    """Return the object that bytes say; in place of torch's ``_tensor_to_object``."""
    if int(size) > MOST_BYTES:
        raise NotPlainError(f"a rank has sent {int(size):,} bytes as plain data; {MOST_BYTES:,} are the most")
    try:
        return _form.get()[1](tensor.cpu().numpy().tobytes()[: int(size)])
    except Exception as error:  # what is no data raises anything
        raise NotPlainError(f"a rank has sent something that is no plain data: {error}") from error
