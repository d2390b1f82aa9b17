"""Prompts and responses token by token: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
