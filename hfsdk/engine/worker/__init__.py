"""The worker of one device: it hosts the roles placed there and runs their calls in order.

May import: core, assets, resharding, engine.calls, engine.process, engine.weights, engine.training, engine.generation.
"""
