"""Which pools lie on which devices, and what fills their memory: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
