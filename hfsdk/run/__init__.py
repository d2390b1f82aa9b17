"""Runs: the training loop, its checks and recovery, comparisons of several runs, and trackers.

May import: core, algorithms, models, planner.perf, engine.calls, viz, diagnose, state, session.algorithm, session.client,
session.context, session.data, session.placing, session.plans, session.role_book, session.role_specs, session.streams,
session.views.
"""
