"""The runtime of a simulated session: a virtual clock, lengths without tokens, spans from a performance model.

May import: core, resharding, engine.calls.
"""
