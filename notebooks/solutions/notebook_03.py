"""Solutions of notebook 3."""

# Half of the model is needed, a quarter is held, and it lies inside that half.
received_share = 1 / 2 - 1 / 4


def received(tp, pp, tp_rollout):
    """Share of the model that a rank receives (HybridFlow, table 2): needed minus held."""
    return 1 / tp_rollout - 1 / (tp * pp)


def training_parts(tp, tp_rollout):
    """The part of the weights that each rank trains, so that it lies inside what the rank generates with."""
    parts_inside = tp // tp_rollout  # training parts in one rollout part
    return [(rank % tp_rollout) * parts_inside + rank // tp_rollout for rank in range(tp)]


ANSWERS = {"03.1": received_share, "03.2": received, "03.3": training_parts}
