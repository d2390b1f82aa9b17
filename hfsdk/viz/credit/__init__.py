"""How one sample's score flows back over its tokens: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
