"""The gap picture: why trainer and generating engine disagree, by cause and by layer.

May import: core, viz.frame, viz.plain.
"""
