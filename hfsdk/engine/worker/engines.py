"""``import_engines``: what takes ten seconds of a processor, ahead of its first use."""

from __future__ import annotations

from functools import cache

from hfsdk.engine.process import startup


def import_engines() -> None:
    """Import what workers compute with: torch, Megatron, vLLM, and hfsdk's parts around them."""
    import_trainer()
    from hfsdk.engine.generation import rollout_engine

    rollout_engine.import_engine()


@cache
def import_trainer() -> None:
    """Import torch, Megatron, and what a worker does with them."""
    with startup.importing():
        from hfsdk.engine.training import cpu_support_megatron

        cpu_support_megatron.install()
        from hfsdk.engine.weights import direct  # noqa: F401
        from hfsdk.engine.worker import hosted  # noqa: F401
