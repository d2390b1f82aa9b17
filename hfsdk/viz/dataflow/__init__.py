"""Calls of a step as a graph, their columns on its edges: view and drawing.

May import: core, resharding, viz.frame, viz.plain.
"""
