"""Training by Megatron-core: models, groups, optimizer, pipeline, losses, checkpoints. The home of ``megatron``.

May import: core, assets, resharding, engine.calls, engine.process, engine.weights.
"""
