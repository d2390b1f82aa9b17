"""The performance model: seconds and bytes of calls, from specifications or fitted to measured spans.

May import: core, resharding.
"""
