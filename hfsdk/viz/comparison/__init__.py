"""Predicted beside measured, or one trace beside another: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
