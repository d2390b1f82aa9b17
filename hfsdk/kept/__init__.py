"""Sessions that outlive their kernel: the process that holds one, how a kernel reaches it, here or from another machine.

May import: core, assets, algorithms, models, engine.calls, engine.controller, engine.process, engine.ray, viz, run,
session.client, session.context, session.parts, session.placing, session.role_book, session.session, session.session_pickle,
session.start, session.streams.
"""
