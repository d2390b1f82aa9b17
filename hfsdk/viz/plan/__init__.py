"""A plan and its runners-up: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
