"""Spans on an axis of time, of one trace or of several: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
