"""``hf.doctor()``: what this machine has and lacks for hfsdk.

May import: core, assets, engine.process, engine.ray.
"""

from hfsdk.doctor.machine import doctor

__all__ = ["doctor"]
