"""Generation by vLLM: the rollout, its sleep and its step loop. The home of ``vllm``.

May import: core, assets, resharding, engine.calls, engine.process, engine.weights.
"""
