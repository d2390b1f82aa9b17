"""Which pools lie on which devices, and what fills their memory: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
