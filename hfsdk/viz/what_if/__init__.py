"""Sliders over a plan's choices: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
