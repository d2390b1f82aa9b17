"""Curves of algorithms compared over seeds: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
