"""One process of the engine: its devices, clocks and spans, safe points, interrupts, rendezvous, the tasks it runs.

May import: core, engine.calls.
"""
