"""How one sample's score flows back over its tokens: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain, viz.tokens.
"""
