"""Weights from the trainer's ranks to the rollout's: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain, viz.svg.
"""
