"""The origin of a run's first bad number, and the recorded calls of a step that show it.

May import: core, assets, models, engine.calls, state, run.metric_outliers, run.recovery, run.run, session.algorithm,
session.client, session.context, session.parts, session.placing, session.role_book, session.session, session.session_pickle,
session.streams.
"""
