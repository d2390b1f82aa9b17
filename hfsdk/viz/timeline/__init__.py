"""Spans on an axis of time, of one trace or of several: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
