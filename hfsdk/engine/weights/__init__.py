"""Weights and optimizer state on the move: shares, bridges, transports, receipts, residency, offload, sums of files.

May import: core, assets, resharding, engine.calls, engine.process.
"""
