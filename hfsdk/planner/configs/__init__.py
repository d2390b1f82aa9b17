"""What the numbers of a configuration mean: those of verl, TRL, OpenRLHF and NeMo-RL are read. Pure; nothing of them is run.

Each system has one module, which reads its keys as its release does and gives a ``step_config.StepConfig``. What comes after it
(the table of batches, memory by phase; in the session the same step in hfsdk) knows that noun alone.

May import: core, planner.perf.
"""
