"""Predicted beside measured, or one trace beside another: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
