"""What the numbers of a configuration mean: those of verl, TRL, OpenRLHF and NeMo-RL are read, and hfsdk's own.

Each system has one module, which reads its keys as its release does and gives a :class:`hfsdk.configs.step_config.StepConfig`; everything
after it (the table of batches, memory by phase, the same step in hfsdk) knows that noun alone. Nothing of a configuration is run.

May import: core, planner, algorithms, models, session, viz.
"""
