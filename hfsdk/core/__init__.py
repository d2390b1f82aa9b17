"""The nouns: models, clusters, layouts, placements, roles, batches, calls, traces, plans, snapshots; frozen, pure, on numpy.

Every other room speaks of them. A module here imports what stands before it in the list of ``tests/test_import_laws.py``, and
nothing of hfsdk outside this folder.

May import: nothing.
"""
