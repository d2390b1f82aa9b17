"""The search for the best placement, layouts and sizes: exact over its family, bounded by tables of least seconds.

May import: core, planner.perf.
"""
