"""A training run while it goes on: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
