"""``session.memory``: what every device holds through one step, as planned and as measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec
from hfsdk.core.trace import Span, Trace
from hfsdk.planner.perf.memory import DeviceMemory, device_bytes

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.viz.frame import Picture

PARTS = ("weights", "gradients", "optimizer", "rollout", "kv_cache")
"""What a worker's tensors are for; ``rollout`` is the generating engine's copy, beyond the trainer's weights."""
ASLEEP = "asleep_bytes"
"""Of a rollout that sleeps: its weights and cache, which are not there, and are counted in nothing else."""
GAUGES = ("rss_bytes", "allocated_bytes", "reserved_bytes")
"""Resident in host memory; torch's tensors on a GPU; what torch holds of the GPU."""


class MemoryUse:
    """Bytes per device through one step: the tensors after every call, the process all along, and what was planned.

    Of a simulated step all of it is predicted, over virtual time. In a notebook it draws itself. Of a measured one the
    numbers were taken when spans ended; what a call needed in between is in the peaks of the process only as far as a span ended
    there.
    """

    def __init__(
        self, trace: Trace, roles: Iterable[RoleSpec], placement: Placement | None, cluster: ClusterSpec, title: str
    ) -> None:
        self.trace, self._cluster, self._title = trace, cluster, title
        self._predicted = trace.source == "predicted"
        planned = () if placement is None else device_bytes(roles, placement, cluster)
        self._planned = {estimate.device: estimate for estimate in planned}

    def view(self) -> dict[str, Any]:
        """Return plain data: for every device planned parts, the tensors after each call, and the gauges at each span's end."""
        spans: dict[int, list[tuple[int, Span]]] = {number: [] for number in self._planned}
        for row, span in enumerate(self.trace.spans):
            if span.device is not None:
                spans.setdefault(span.device, []).append((row, span))
        return {
            "title": self._title, "duration_s": self.trace.duration_s, "predicted": self._predicted,
            "devices": [self._device(number, mine) for number, mine in sorted(spans.items())],
        }  # fmt: skip

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per device and call: start_s, end_s, the parts in bytes (``PARTS``, ``ASLEEP``), the gauges at its end."""
        import pandas as pd

        rows = [{"device": d["device"], **call} for d in self.view()["devices"] for call in d["calls"]]
        parts = (*(f"{part}_bytes" for part in PARTS), ASLEEP)
        return pd.DataFrame(rows, columns=["device", "row", "call", "start_s", "end_s", *parts, *GAUGES])

    def _device(self, number: int, spans: Sequence[tuple[int, Span]]) -> dict[str, Any]:
        estimate, origin = self._planned.get(number), self.trace.start_ns
        calls, samples = [], []
        for row, span in spans:
            if span.end_ns is None or span.predicted != self._predicted:
                continue
            end_s, gauges = (span.end_ns - origin) / 1e9, {k: span.attrs.get(k) for k in GAUGES}
            if self._predicted and span.parent:  # a stretch: what it needs it needs from its beginning
                samples.append([(span.start_ns - origin) / 1e9, *gauges.values()])
            if any(gauge is not None for gauge in gauges.values()):
                samples.append([end_s, *gauges.values()])
            if not span.parent and any(f"{p}_bytes" in span.attrs for p in PARTS):
                parts = {f"{p}_bytes": int(span.attrs.get(f"{p}_bytes", 0)) for p in PARTS}
                when = {"start_s": (span.start_ns - origin) / 1e9, "end_s": end_s}
                asleep = {ASLEEP: int(span.attrs.get(ASLEEP, 0))}
                calls.append({"row": row, "call": f"{span.role}.{span.method}", **when, **parts, **asleep, **gauges})
        spec = self._cluster.devices[number]
        samples = [sample for sample in samples if any(value is not None for value in sample[1:])]
        return {
            "device": number, "name": spec.name, "limit_bytes": spec.memory_bytes,
            "planned": None if estimate is None else _planned(estimate), "calls": calls, "samples": sorted(samples),
            "bases": [] if estimate is None else [list(names) for names in estimate.bases],
        }  # fmt: skip

    def _picture_(self) -> Picture:
        from hfsdk.viz.memory.view import MemoryPicture, memory_view

        return MemoryPicture(memory_view(self.view()))

    def _repr_html_(self) -> str | None:
        from hfsdk.viz.hooks import html_of

        return html_of(self)

    def __repr__(self) -> str:
        lines = [f"{self._title}: bytes per device, in GB"]
        for device in self.view()["devices"]:
            planned, calls = device["planned"], device["calls"]
            words = [] if planned is None else [f"{planned['asked'] / 1e9:.2f} planned at most"]
            if calls:
                last = calls[-1]
                words += [f"{p} {last[f'{p}_bytes'] / 1e9:.2f}" for p in PARTS if last[f"{p}_bytes"]]
                words += [f"asleep {last[ASLEEP] / 1e9:.2f}"] if last[ASLEEP] else []
                most = max(value for sample in device["samples"] for value in sample[1:] if value is not None)
                what = "predicted with all that calls need" if self._predicted else "the process"
                words.append(f"{what} {most / 1e9:.2f} at most")
            words += [f"one base for {', '.join(names)}" for names in device["bases"]]
            lines.append(f"  device {device['device']}: " + (", ".join(words) or "nothing planned, nothing measured"))
        return "\n".join(lines)


def _planned(estimate: DeviceMemory) -> Mapping[str, int]:
    """Return the parts at the fullest moment, in the order of ``PARTS``, what the greediest call needs besides, and their sum.

    A rollout that sleeps is there at that moment only if it is its generating that makes it the fullest.
    """
    greediest = max((r.working for r in estimate.roles.values()), default=0)
    awake = next((name for name, r in estimate.roles.items() if r.asleep and r.asleep == greediest), "")
    roles = [
        r if not r.asleep or name == awake else replace(r, rollout_weights=0, kv_cache=0) for name, r in estimate.roles.items()
    ]
    parts = {
        "process": estimate.process, **{part: sum(r.stays(part) for r in roles) for part in ("weights", "gradients", "optimizer")},
        "rollout": sum(r.rollout_weights for r in roles), "kv_cache": sum(r.kv_cache for r in roles),
    }  # fmt: skip
    return {**parts, "working": max(0, estimate.asked - sum(parts.values())), "asked": estimate.asked}
