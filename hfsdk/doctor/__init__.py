"""What this machine has and lacks for hfsdk: ``hf.doctor()``.

May import: core, assets, engine.process, engine.ray.
"""

from hfsdk.doctor.machine import doctor

__all__ = ["doctor"]
