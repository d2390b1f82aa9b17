"""Ray: start and stop of clusters, workers as actors, the runtime that does real work. The home of ``ray``.

May import core, resharding and every room of the engine but simulation and controller.
"""
