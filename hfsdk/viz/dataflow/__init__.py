"""Calls of a step as a graph, their columns on its edges: the view that its module draws.

May import: core, resharding, viz.frame, viz.plain.
"""
