"""Long tails: what a step takes under schemes of generation that a synchronous one can be replaced with, token by token.

May import: core, planner.perf.
"""
