"""The session: devices, roles, prompts, training, checkpoints.

May import: core, resharding, assets, algorithms, planner, models, viz, engine.calls, engine.process, engine.weights,
engine.generation, engine.simulation, engine.controller, engine.ray, state, run, diagnose, kept.
"""
