"""Who holds what on each device: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
