"""Calls on their way: messages to the controller, the rows of each rank, micro-batches, the plan of a shadow's weights.

Pure.

May import: core, resharding.
"""
