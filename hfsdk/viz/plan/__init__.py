"""A plan and its runners-up: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
