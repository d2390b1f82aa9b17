"""Where a run's first bad number comes from, and the recorded calls of a step that show it.

May import: core, models, engine.calls, run.metric_outliers, run.recovery, run.run, session.algorithm, session.client,
session.context, session.parts, session.streams.
"""
