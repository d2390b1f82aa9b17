"""Prompts and responses token by token: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
