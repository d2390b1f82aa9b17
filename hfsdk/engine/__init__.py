"""Execution: the controller, the workers, both engines and both runtimes; knows no algorithm.

One folder per room, bottom-up: calls, process, weights, training, generation, worker, ray, simulation, controller. A room imports
core, resharding and the rooms before it; controller and simulation import no torch and no ray.

May import: core.
"""
