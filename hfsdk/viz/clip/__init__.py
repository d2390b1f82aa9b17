"""The ratio's histogram and what is clipped: view and drawing.

May import: core, resharding, viz.frame, viz.plain, viz.tokens.
"""
