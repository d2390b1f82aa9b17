"""Prompts and responses token by token: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
