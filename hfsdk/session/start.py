"""Which runtime a session gets: Ray here or on a cluster, or the simulated one."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.checks import check_options
from hfsdk.errors import ModelNotFoundError, OptionError
from hfsdk.plan import LENGTH_KINDS, Lengths
from hfsdk.planner.perf_model import PerfModel
from hfsdk.runtime import Runtime
from hfsdk.spec import ClusterSpec

if TYPE_CHECKING:
    from hfsdk.engine.simulated_runtime import SimulatedRuntime


def start_runtime(devices: int | str | None) -> Runtime:
    """Start the Ray runtime.

    Raises:
        OptionError: ``devices`` is neither a number, ``"auto"`` nor an address.
        ModelNotFoundError: Ray is not installed.
    """
    if isinstance(devices, bool) or not isinstance(devices, (int, str, type(None))) or (isinstance(devices, int) and devices < 1):
        raise OptionError(f"devices is a number of at least 1, 'auto', or the address of a Ray cluster; got {devices!r}")
    if isinstance(devices, str) and devices != "auto" and ":" not in devices:
        raise OptionError(
            f"devices={devices!r} is neither 'auto' nor an address like '10.0.0.1:6379'; "
            "to simulate a cluster call Session.simulated('16x8 A100-80GB')"
        )
    if isinstance(devices, str) and devices.startswith("ray://"):
        raise OptionError("a Ray Client address (ray://) cannot run worker groups; give the cluster's own address, host:6379")
    try:
        from hfsdk.engine.ray_runtime import RayRuntime
    except ModuleNotFoundError as error:
        raise ModelNotFoundError(
            f"real work needs the package {error.name!r}, which is not installed here: pip install 'hfsdk[cpu]' or 'hfsdk[cuda]' "
            "(hf.doctor() lists what is missing). Session.simulated('1x2 A100-80GB') needs none."
        ) from error
    if isinstance(devices, str):
        return RayRuntime(address=devices)
    return RayRuntime(num_devices=devices if devices is not None else _default_devices())


def _default_devices() -> int | None:
    """Return ``None`` (all of them) where there are GPUs, else at most two processes."""
    return None if Path("/dev/nvidia0").exists() else min(2, os.cpu_count() or 1)


def check_session(price_per_device_hour: object, wait: object, seed: object, name: object) -> None:
    """Check what every session takes.

    Raises:
        OptionError: names the first that is out of its range.
    """
    price = price_per_device_hour
    if isinstance(price, bool) or not isinstance(price, numbers.Real) or not 0 <= float(price) < float("inf"):
        raise OptionError(f"price_per_device_hour must be a finite number of at least 0; got {price!r}")
    check_options(
        "a session", wait=(wait, bool), seed=(seed, int),
        name=(name, str | None),
    )  # fmt: skip
    if seed < 0:  # type: ignore[operator]
        raise OptionError(f"a session's seed must be at least 0; got {seed!r}")


def start_simulated(cluster: str | ClusterSpec, response_lengths: Any, perf: PerfModel | None = None) -> SimulatedRuntime:
    """Return the simulated runtime with a performance model, by default the presets', and the memory model of the planner.

    Raises:
        OptionError: the cluster, the distribution or the model is none.
    """
    if not isinstance(cluster, str | ClusterSpec):
        raise OptionError(f"the cluster to simulate is a text such as '16x8 A100-80GB' or an hf.ClusterSpec; got {cluster!r}")
    cluster = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    if not (perf is None or isinstance(perf, PerfModel)):
        raise OptionError(f"perf is an hf.PerfModel(...), e.g. that of session.calibrate().perf; got {perf!r}")
    known = response_lengths in LENGTH_KINDS if isinstance(response_lengths, str) else isinstance(response_lengths, Lengths)
    if response_lengths is not None and (not known or isinstance(response_lengths, type)):
        raise OptionError(
            f"response_lengths are one of {', '.join(map(repr, LENGTH_KINDS))}, or have a method draw(sampling, seed, positions, "
            f"copies) that gives every sample's length, as ResponseLengths has; got {response_lengths!r}"
        )
    from hfsdk.engine.simulated_runtime import SimulatedRuntime
    from hfsdk.planner.memory import CPU_PROCESS_BYTES, GPU_PROCESS_BYTES, role_bytes

    on_cpu = cluster.devices[0].name.startswith("cpu")
    return SimulatedRuntime(
        cluster,
        PerfModel() if perf is None else perf,
        response_lengths="full" if response_lengths is None else response_lengths,
        memory=lambda role, pool_size: role_bytes(role, pool_size, on_cpu=on_cpu),
        process_bytes=CPU_PROCESS_BYTES if on_cpu else GPU_PROCESS_BYTES,
    )
