"""A configuration and what its numbers mean.

May import: core, resharding, viz.frame, viz.plain, viz.memory.
"""
