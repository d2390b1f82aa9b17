"""A session's state over time: its history, snapshots, and checkpoints in folders and stores.

May import: core, algorithms, models, engine.calls, engine.controller, engine.process, run.run, session.client, session.context,
session.placing, session.role_book, session.streams.
"""
