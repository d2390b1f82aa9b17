"""Resharding: the bytes that a rank receives, the parts it trains, the closed formula."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Code, Exercise, Number


def _received(tp: int, pp: int, tp_rollout: int) -> float:
    return 1 / tp_rollout - 1 / (tp * pp)


def _needed(tp: int, pp: int, tp_rollout: int) -> float:
    return 1 / tp_rollout


def _without_stages(tp: int, pp: int, tp_rollout: int) -> float:
    return 1 / tp_rollout - 1 / tp


def _gathered(tp: int, pp: int, tp_rollout: int) -> float:
    return 1 - 1 / (tp * pp)


def _strided(tp: int, tp_rollout: int) -> list[int]:
    return [rank % tp_rollout * (tp // tp_rollout) + rank // tp_rollout for rank in range(tp)]


def _consecutive(tp: int, tp_rollout: int) -> list[int]:
    return list(range(tp))


def _by_replicas(tp: int, tp_rollout: int) -> list[int]:
    replicas = tp // tp_rollout
    return [rank % replicas * tp_rollout + rank // replicas for rank in range(tp)]


EXERCISES: dict[str, Exercise] = {
    "03.1": Number(
        right=0.25,
        wrong={
            0.5: "That is what a rank needs. A part of it is there already.",
            0.75: "That is what gathering the whole model would take. A rank generates with a part of it.",
            1.0: "That is the whole model. A rank generates with a part of it.",
            0.0: "Nothing would move if both layouts were the same.",
        },
        otherwise="What a rank needs for generating, minus what it holds of that from training.",
        because="it needs a half and holds a quarter, which lies inside that half.",
    ),
    "03.2": Code(
        right=_received,
        cases=((8, 1, 2), (8, 1, 4), (8, 4, 8), (8, 8, 8), (4, 1, 4)),
        wrong=(
            (_needed, "That is what a rank needs. What it holds from training does not have to come."),
            (_without_stages, "A training shard is smaller where there are pipeline stages too."),
            (_gathered, "That is a gather over all of tp and pp (HybridFlow-V). A rank keeps only its rollout shard."),
        ),
        otherwise="Share of the model that is needed, minus the share that is held.",
        because="needed 1/tp of the rollout, held 1/(tp x pp) of training: 0.375, 0.125, 0.094, 0.109 in the paper's table 2.",
    ),
    "03.3": Code(
        right=_strided,
        cases=((4, 2), (8, 2), (8, 4)),
        wrong=(
            (
                _consecutive,
                "These are vanilla groups. Rank 1 would train part 1, which lies outside the half that it generates with.",
            ),
            (
                _by_replicas,
                "Close: it goes through the parts by replicas. Neighbouring ranks are one rollout group: their parts are a whole "
                "rollout shard apart.",
            ),
        ),
        otherwise="Rank r is part r % tp_rollout of replica r // tp_rollout; its training part must lie inside that rollout part.",
        because="each rank's training part lies inside its rollout part, so that all it holds is used.",
    ),
}
