"""Sliders over a plan's choices: view and drawing.

May import: core, resharding, viz.frame, viz.modules, viz.plain, viz.plan.
"""
