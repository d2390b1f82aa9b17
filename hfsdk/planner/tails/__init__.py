"""Long tails: a step's seconds under schemes of generation that can replace a synchronous one, token by token.

May import: core, planner.perf.
"""
