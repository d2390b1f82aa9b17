"""A training run while it goes on: view and drawing.

May import: core, resharding, viz.frame, viz.plain, viz.curves.
"""
