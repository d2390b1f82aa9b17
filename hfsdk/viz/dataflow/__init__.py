"""Calls of a step as a graph, their columns on its edges: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
