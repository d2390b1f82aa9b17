"""A performance model before and after it was fitted, against what was measured.

May import: core, resharding, viz.frame, viz.plain.
"""
