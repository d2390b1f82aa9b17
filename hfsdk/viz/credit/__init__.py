"""How one sample's score flows back over its tokens: view and drawing.

May import: core, resharding, viz.frame, viz.plain, viz.tokens.
"""
