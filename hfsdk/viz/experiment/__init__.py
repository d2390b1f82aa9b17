"""Curves of algorithms compared over seeds: view and drawing.

May import: core, resharding, viz.frame, viz.plain, viz.svg.
"""
