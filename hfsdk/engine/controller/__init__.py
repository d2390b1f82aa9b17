"""The controller: takes messages, keeps the order of calls, knows placements, snapshots, deaths. Drives either runtime.

May import core, resharding, calls, process, simulation (to run a step again). No torch, no ray.
"""
