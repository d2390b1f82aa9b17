"""The controller: takes messages, keeps the order of calls, knows placements, snapshots, deaths. Drives either runtime.

May import: core, engine.calls, engine.simulation.
"""
