"""The nouns: models, clusters, layouts, placements, roles, batches, calls, traces, plans, snapshots; frozen, pure, on numpy.

Every other room speaks of them. A module here imports others of this folder, without a cycle, and nothing else of hfsdk.

May import: nothing.
"""
