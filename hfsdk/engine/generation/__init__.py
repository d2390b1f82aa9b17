"""Generation by vLLM: the rollout, its sleep and its step loop. The home of ``vllm``.

May import core, resharding, calls, process, weights.
"""
