"""70B on 128 GPUs: weights of a device, bytes of a transition, another algorithm."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Code, Exercise, Number


def _speed_up(seconds: float, seconds_few: float, devices: int, devices_few: int) -> float:
    return (seconds_few / seconds) / (devices / devices_few)


def _plain(seconds: float, seconds_few: float, devices: int, devices_few: int) -> float:
    return seconds_few / seconds


def _inverse(seconds: float, seconds_few: float, devices: int, devices_few: int) -> float:
    return (seconds / seconds_few) / (devices / devices_few)


def _of_devices(seconds: float, seconds_few: float, devices: int, devices_few: int) -> float:
    return devices_few / devices


def _whitened(advantages: list[list[float]]) -> list[list[float]]:
    flat = [a for row in advantages for a in row]
    mean = sum(flat) / len(flat)
    deviation = (sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)) ** 0.5
    return [[(a - mean) / deviation for a in row] for row in advantages]


def _by_rank(advantages: list[list[float]]) -> list[list[float]]:
    return [_whitened([row])[0] for row in advantages]


def _mean_only(advantages: list[list[float]]) -> list[list[float]]:
    flat = [a for row in advantages for a in row]
    return [[a - sum(flat) / len(flat) for a in row] for row in advantages]


def _scaled_only(advantages: list[list[float]]) -> list[list[float]]:
    flat = [a for row in advantages for a in row]
    mean = sum(flat) / len(flat)
    deviation = (sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)) ** 0.5
    return [[a / deviation for a in row] for row in advantages]


EXERCISES: dict[str, Exercise] = {
    "10.1": Number(
        right=2.155,
        wrong={
            17.24: "That is with tp alone: a device has the layers of one stage only.",
            1.078: "Copies (dp) do not share weights.",
            137.95: "That is the whole model, on every device.",
            68.98: "That is with dp alone, which cuts nothing.",
        },
        otherwise="138 GB, cut by what of tp8 pp8 dp2?",
        because="138 GB / (8 x 8); the two copies have the same.",
        tolerance=0.02,
    ),
    "10.2": Code(
        right=_speed_up,
        cases=((50.0, 200.0, 128, 16), (100.0, 200.0, 128, 64), (25.0, 200.0, 128, 16)),
        wrong=(
            (_plain, "That is the speed-up. How much of it was there to be had, with so many more devices?"),
            (_inverse, "Seconds that fall are a speed-up: few over many."),
            (_of_devices, "The seconds are not used."),
        ),
        otherwise="Speed-up, divided by how many times as many devices there are.",
        because="the speed-up as a share of what as many more devices could bring: 1 would be perfect.",
    ),
    "10.3": Code(
        right=_whitened,
        cases=(([[1.0, 2.0], [3.0, 4.0]],), ([[0.0, 0.1, 0.2], [5.0, 4.0]],), ([[-1.0, 1.0], [2.0, 6.0, 1.0]],)),
        wrong=(
            (_mean_only, "Their mean is 0; their variance shall be 1 as well."),
            (_scaled_only, "Their variance is 1; their mean shall be 0 as well."),
            (
                _by_rank,
                "Each rank whitens its own: a rank that drew the good responses calls half of them bad.",
            ),
        ),
        otherwise="One mean and one deviation (with n - 1) for the tokens of all ranks.",
        because="one mean and one deviation over all ranks, so that dp2 learns what dp1 does.",
    ),
}
