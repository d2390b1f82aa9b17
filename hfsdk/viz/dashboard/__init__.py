"""A training run while it goes on: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
