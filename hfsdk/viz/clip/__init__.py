"""The ratio's histogram and what is clipped: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain, viz.tokens.
"""
