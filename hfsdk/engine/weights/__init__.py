"""Weights and optimizer state on the move: shares, bridges, transports, receipts, residency, offload, sums of files.

May import core, resharding, calls, process.
"""
