"""The ratio's histogram and what is clipped: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
