"""Which roles a checkpoint is of: what of them must agree with the session's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hfsdk.core.errors import CheckpointError
from hfsdk.core.store import AnyPath
from hfsdk.models import ModelHandle


def identity(handle: ModelHandle) -> dict[str, Any]:
    """What must agree between a checkpoint and the role it is loaded into."""
    role = handle.role
    assert role.model is not None
    model = {k: v for k, v in asdict(role.model).items() if k != "name" and v is not None}  # older saves lack newer fields
    lora = None if role.lora is None else {k: v for k, v in asdict(role.lora).items() if k != "seed"}
    return {
        "kind": role.kind, "model": model, "name": str(role.model), "layout": str(role.train), "dtype": role.dtype, "lora": lora,
    }  # fmt: skip


def check_roles(root: AnyPath, saved: Mapping[str, Any], trained: Sequence[ModelHandle]) -> None:
    """Check that the roles of a checkpoint are those of the session.

    Raises:
        CheckpointError: names what differs, and what to do.
    """
    mine = {h.name: identity(h) for h in trained}
    missing = [name for name in saved if name not in mine]
    if missing:
        names = ", ".join(missing)
        raise CheckpointError(f"the checkpoint in {root} has {names}, which the session does not; declare {missing[0]} first")
    extra = [name for name in mine if name not in saved]
    if extra:
        names = f"{', '.join(extra)}; it has {', '.join(saved)}"
        raise CheckpointError(f"the checkpoint in {root} has no {names}. Release {extra[0]} first.")
    for name, role in mine.items():
        for key, words in (("kind", "kind"), ("model", "model"), ("dtype", "dtype"), ("lora", "LoRA")):
            if _plain(saved[name].get(key)) != _plain(role[key]):
                old = saved[name]["name"] if key == "model" else saved[name].get(key)
                new = role["name"] if key == "model" else role[key]
                detail = _differences(saved[name]["model"], role["model"]) if key == "model" else ""
                raise CheckpointError(
                    f"the checkpoint in {root} has {name} with {words} {old!r}; the session has {new!r}{detail}. "
                    "Declare the role as it was saved; only its layout may be another."
                )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()} if isinstance(value, Mapping) else value


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    found = [f"{k} {old.get(k)} -> {new.get(k)}" for k in new if old.get(k) != new.get(k)]
    return f" ({', '.join(found)})"
