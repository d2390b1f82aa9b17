"""Other systems' configurations (verl, TRL, OpenRLHF, NeMo-RL), read and explained: ``hf.explain`` is the door.

May import: core, algorithms, planner.perf, viz, kept.attach, run.notebook, session.session.
"""
