"""The weights that are on each rank: who holds them, beside what the plan says.

May import: core, resharding, viz.frame, viz.plain.
"""
