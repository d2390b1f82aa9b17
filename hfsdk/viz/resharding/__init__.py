"""Weights from the trainer's ranks to the rollout's: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
