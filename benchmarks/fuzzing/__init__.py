"""Every public callable against bad input: ``fuzz(seed, num, kinds)`` gives counts and a reproduction of each failure.

The law: a call with any values at all either succeeds or raises one clear line (an ``HfsdkError``, or a ``TypeError`` or
``ValueError`` that names the argument), soon, before anything of the session is changed, without gigabytes.

======================  =============================================================================================
``inventory``           which callables there are, found by walking the package, and which are left out and why
``values``              wrong values: other types, extreme numbers, strange texts, cyclic containers, hostile objects
``strategies``          hypothesis strategies by parameter: ``from_type`` of its annotation, with our own types registered
``world``               a session with one of everything, which the calls are made on
``law``                 one call, judged
``campaign``            many calls in a child process with a memory limit and a watchdog
======================  =============================================================================================
"""

from .campaign import Report, fuzz, reproduce
from .inventory import EXCEPTED, Target, targets

__all__ = ["EXCEPTED", "Report", "Target", "fuzz", "reproduce", "targets"]
