"""Who holds what on each device: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
