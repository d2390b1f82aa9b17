"""``RolloutWeights``: whether a role's generating engine has the trainer's weights, from call to call; for simulation and planner.

The rollout's are stale after every call that changes the trainer's, or may; the next generation takes them over first. Where both
engines share one copy (CPU, ``cpu_weights="shared"``) it is with one of them, and calls of the other wait until it is back::

    generate      update        generate                    shared:   generate      compute_log_probs   generate
    takes over    makes stale   takes over                            takes over    brings back         takes over
"""

from __future__ import annotations

from dataclasses import dataclass

from hfsdk.core.methods import method_of


@dataclass(eq=False)
class RolloutWeights:
    """The weights of one rollout: ask before a call, :meth:`note` it after."""

    shared: bool = False
    """Whether only one of the two engines has them at a time."""
    fresh: bool = False
    """Whether they are the trainer's as these are now."""
    generating: bool = False
    """Whether the rollout has the weights, where both engines share them."""

    def stale_for(self, method: str) -> bool:
        """Whether the method generates and the weights are not the trainer's."""
        return method_of(method).generates and not self.fresh

    def away_for(self, method: str) -> bool:
        """Whether they are shared and with the other engine than the one that the method needs."""
        kind = method_of(method)
        return self.shared and (bool(kind.needs) if self.generating else kind.generates)

    def note(self, method: str) -> None:
        """Note a call that is over."""
        kind = method_of(method)
        if kind.generates:
            self.fresh = self.generating = True
        elif kind.needs:
            self.generating = False
        if kind.touches_weights:
            self.fresh = False
