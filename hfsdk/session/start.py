"""The runtime of a session: Ray here or on a cluster, or the simulated one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.core.checks import NonNegative, Title, Within, check_options, shown
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import ModelNotFoundError, OptionError
from hfsdk.core.plan import Lengths
from hfsdk.core.response_lengths import LENGTH_KINDS
from hfsdk.core.runtime import Runtime
from hfsdk.core.system import without_engines
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.session.client import Sender

if TYPE_CHECKING:
    from hfsdk.engine.simulation.runtime import SimulatedRuntime


Seconds = Annotated[float, Within(0.1, 10**6)]
"""A time limit of waiting for processes."""

Seed = Annotated[int, Within(0, 2**63 - 1)]
"""A seed of random numbers."""


@dataclass(frozen=True, eq=False)
class Started:
    """A controller, and what it has to run calls on."""

    controller: Sender
    cluster: ClusterSpec
    kind: str
    """``"ray"`` or ``"simulated"``."""
    notices: Sequence[str] = ()
    """Sentences for the user about who can reach the controller."""


def start(devices: int | str | None, options: Mapping[str, Any]) -> Started:
    """Start the Ray runtime and a controller over it. ``options`` are the runtime's.

    Raises:
        OptionError: ``devices`` is neither a number, ``"auto"`` nor an address.
        PlacementError: there is no such cluster, it cannot be trusted, or Ray cannot be started here.
        ModelNotFoundError: Ray is not installed, or the engines do not run on this system.
    """
    if isinstance(devices, bool) or not isinstance(devices, (int, str, type(None))) or (isinstance(devices, int) and devices < 1):
        raise OptionError(f"devices is a number of at least 1, 'auto', or the address of a Ray cluster; got {shown(devices)}")
    if isinstance(devices, str) and devices != "auto" and ":" not in devices:
        raise OptionError(
            f"devices={shown(devices)} is neither 'auto' nor an address like '10.0.0.1:6379'; "
            "to simulate a cluster call Session.simulated('16x8 A100-80GB')"
        )
    if isinstance(devices, str) and devices.startswith("ray://"):
        raise OptionError("a Ray Client address (ray://) cannot run worker groups; give the cluster's own address, host:6379")
    if refused := without_engines():
        raise ModelNotFoundError(refused)
    try:
        from hfsdk.engine.ray.runtime import RayRuntime
    except ModuleNotFoundError as error:
        raise ModelNotFoundError(
            f"real work needs the package {error.name!r}, which is not installed here: pip install 'hfsdk[cpu]' or 'hfsdk[cuda]' "
            "(hf.doctor() lists what is missing). Session.simulated('1x2 A100-80GB') needs none."
        ) from error
    if isinstance(devices, str):
        runtime = RayRuntime(address=devices, **options)
    else:
        runtime = RayRuntime(num_devices=_default_devices() if devices is None else devices, **options)
    return _controlled(runtime, runtime.notices)


def _default_devices() -> int | None:
    """Return ``None`` (all of them) where there are GPUs, else at most two processes."""
    return None if Path("/dev/nvidia0").exists() else min(2, os.cpu_count() or 1)


def check_session(
    price_per_device_hour: object, wait: object, seed: object, name: object, *, start_timeout_s: object = 1.0,
    collective_timeout_s: object = None, deterministic: object = False,
) -> None:  # fmt: skip
    """Check what every session takes, and the options of a real one.

    Raises:
        OptionError: names the first that is out of its range.
    """
    check_options(
        "a session", price_per_device_hour=(price_per_device_hour, NonNegative), wait=(wait, bool), seed=(seed, Seed),
        name=(name, Title | None), start_timeout_s=(start_timeout_s, Seconds),
        collective_timeout_s=(collective_timeout_s, Seconds | None), deterministic=(deterministic, bool),
    )  # fmt: skip


def as_started(runtime: Runtime | Started) -> Started:
    """Return a runtime of the caller's with a controller over it; a started one as it is.

    Raises:
        OptionError: it has no devices.
    """
    if isinstance(runtime, Started):
        return runtime
    try:
        has_cluster = isinstance(runtime.cluster, ClusterSpec)
    except Exception:  # an object of the user, whatever it raises
        has_cluster = False
    if not has_cluster:
        raise OptionError(f"runtime runs the calls and has a cluster of devices; leave it out for Ray; got {shown(runtime)}")
    return _controlled(runtime)


def _controlled(runtime: Runtime, notices: Sequence[str] = ()) -> Started:
    from hfsdk.engine.controller.controller import Controller

    return Started(Controller(runtime), runtime.cluster, runtime.kind, notices)


def start_simulated(cluster: str | ClusterSpec, response_lengths: Any, perf: PerfModel | None = None) -> SimulatedRuntime:
    """Return the simulated runtime with a performance model, by default the presets', and the memory model of the planner.

    Raises:
        OptionError: the cluster, the distribution or the model is none.
    """
    cluster = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    valid = response_lengths in LENGTH_KINDS if isinstance(response_lengths, str) else isinstance(response_lengths, Lengths)
    if response_lengths is not None and (not valid or isinstance(response_lengths, type)):
        raise OptionError(
            f"response_lengths are one of {', '.join(map(repr, LENGTH_KINDS))}, or have a method draw(sampling, seed, positions, "
            f"copies) that gives every sample's length, as ResponseLengths has; got {shown(response_lengths)}"
        )
    from hfsdk.engine.simulation.runtime import SimulatedRuntime
    from hfsdk.planner.perf.memory import CPU_PROCESS_BYTES, GPU_PROCESS_BYTES, role_bytes

    on_cpu = cluster.devices[0].name.startswith("cpu")
    return SimulatedRuntime(
        cluster,
        PerfModel() if perf is None else perf,
        response_lengths="full" if response_lengths is None else response_lengths,
        memory=lambda role, pool_size: role_bytes(role, pool_size, on_cpu=on_cpu),
        process_bytes=CPU_PROCESS_BYTES if on_cpu else GPU_PROCESS_BYTES,
    )


def start_kept(devices: int | None, own_machine: bool, price_per_device_hour: float, options: Mapping[str, Any]) -> Started:
    """Start a controller in the process of a session's keeper, over the Ray that this process belongs to.

    Raises:
        PlacementError: it has fewer devices.
    """
    from hfsdk.engine.ray.runtime import RayRuntime

    runtime = RayRuntime(devices, None if own_machine else "auto", own_machine=own_machine, **options)
    started = _controlled(runtime)
    return replace(started, cluster=replace(started.cluster, price_per_device_hour=price_per_device_hour))
