"""``import_engines``: what takes ten seconds of a processor, ahead of its first use."""

from __future__ import annotations

from hfsdk.engine.process import startup


def import_engines() -> None:
    """Import what workers compute with: torch, Megatron, vLLM, and hfsdk's parts around them."""
    with startup.making_what_stays():
        from hfsdk.engine.training import cpu_support_megatron

        cpu_support_megatron.install()
        from hfsdk.engine.generation import rollout_engine
        from hfsdk.engine.worker import hosted  # noqa: F401

        rollout_engine.import_engine()
