"""``Context``: what every part of a session shares."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from hfsdk.core.cluster import ClusterSpec
from hfsdk.models.counters import Counters
from hfsdk.session.client import ControllerClient
from hfsdk.session.declare import Backend


@dataclass(eq=False)
class Context:
    """A session's name, devices, seed and way to the controller.

    Attributes:
        name: shown in pictures.
        cluster: the devices.
        runtime: what runs the calls: ``"ray"`` or ``"simulated"``.
        client: who calls are sent through.
        seed: of sampling, shuffling and new heads, where a call gives none.
        messages: notices so far.
        counters: numbers that are saved with the session.
    """

    name: str
    cluster: ClusterSpec
    runtime: str
    client: ControllerClient
    seed: int
    messages: list[str] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    @property
    def simulated(self) -> bool:
        """Whether nothing is real: seconds are those of a virtual clock, and there are no values."""
        return self.runtime == "simulated"

    @property
    def backend(self) -> Backend:
        """What roles are declared on."""
        return Backend(self.cluster, simulated=self.simulated)

    def notice(self, text: str) -> None:
        """Keep a notice for the session's picture, and warn."""
        self.messages.append(text)
        warnings.warn(text, UserWarning, stacklevel=2)
