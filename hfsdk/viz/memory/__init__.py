"""Who holds what on each device: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
