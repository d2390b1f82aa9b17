"""Weights from the trainer's ranks to the rollout's: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
