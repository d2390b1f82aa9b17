"""Which pools lie on which devices, and what fills their memory: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
