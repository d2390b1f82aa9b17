"""Ray: start and stop of clusters, workers as actors, the runtime that does real work. The home of ``ray``.

May import: core, engine.calls, engine.process, engine.weights, engine.training, engine.generation, engine.worker.
"""
