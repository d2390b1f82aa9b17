"""A plan and its runners-up: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
