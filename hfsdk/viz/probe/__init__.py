"""A reward on some samples: scores over what they might follow, seconds, groups, and what failed.

May import: core, viz.frame, viz.plain.
"""
