"""``hf.doctor()``: the parts that hfsdk needs and this machine has or lacks.

May import: core, assets, engine.process, engine.ray.
"""

from hfsdk.doctor.machine import doctor

__all__ = ["doctor"]
