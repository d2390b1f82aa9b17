"""Resharding: which boxes of a weight a rank holds and needs, and the plan of copies and sends between them; pure, on numpy.

May import: core.
"""
