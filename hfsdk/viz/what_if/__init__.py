"""Sliders over a plan's choices: the view that its module draws.

May import: core, resharding, viz.frame, viz.modules, viz.plain, viz.plan, viz.raster.
"""
