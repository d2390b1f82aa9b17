"""Branches of a session: snapshots, rewinds, forks: view and drawing.

May import: core, resharding, viz.frame, viz.plain, viz.svg.
"""
