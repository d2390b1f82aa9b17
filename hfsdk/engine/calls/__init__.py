"""What a call is on its way: messages to the controller, the rows each rank gets, micro-batches, what shadows are sent.

Pure.

May import: core, resharding.
"""
