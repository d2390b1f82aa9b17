"""Branches of a session: snapshots, rewinds, forks: view and drawing.

May import core, resharding and what stands in ``viz/`` itself.
"""
