"""Robust, regularised least squares by Gauss and Newton's method with Levenberg's damping, as ``calibration`` states them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hfsdk.core.table import Array

PRIOR = 3e-3
"""Weight of the prior: a constant a factor of ten from its preset counts as much as one observation that is 13 % off."""
HUBER = 0.2
"""Log error from which on an observation counts linearly: about 20 %."""
MOST = math.log(100.0)
"""No constant moves by more than a factor of a hundred."""


def jacobian(function: Callable[[Array], Array], theta: Array, h: float = 1e-3) -> Array:
    """Return the derivatives by central differences, [observations, constants]."""
    columns = [(function(theta + h * e) - function(theta - h * e)) / (2 * h) for e in np.eye(len(theta))]
    return np.stack(columns, axis=1) if columns else np.zeros((len(function(theta)), 0))


def leverages(residuals: Callable[[Array], Array], theta: Array, weights: Array) -> Array:
    """Return how much of each residual its own observation has taken away, from 0 to 1: the diagonal of the hat matrix.

    A residual r of leverage h would be r / (1 - h) had its observation been left out (to first order; of least squares exactly:
    Allen, 1974), and was decided by it alone where h is 1.
    """
    if not len(theta):
        return np.zeros(len(weights))
    size, slopes = np.abs(residuals(theta)), jacobian(residuals, theta)
    robust = weights**2 * np.minimum(1.0, HUBER / np.maximum(size, 1e-12))
    inverse = np.linalg.inv(slopes.T @ (robust[:, None] * slopes) + PRIOR * np.eye(len(theta)))
    found: Array = robust * np.einsum("ik,kl,il->i", slopes, inverse, slopes)
    return found.clip(0.0, 1.0)


def solve(residuals: Callable[[Array], Array], theta: Array, weights: Array, rounds: int = 40) -> Array:
    """Minimise the robust, regularised sum of squares (``hfsdk.planner.perf.calibration``)."""
    if not len(theta):
        return theta

    def loss(residual: Array, at: Array) -> float:
        size = np.abs(residual)
        huber = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
        return float((weights**2 * huber).sum() + PRIOR * (at**2).sum())

    damping, residual = 1e-2, residuals(theta)
    for _ in range(rounds):
        robust = weights**2 * np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-12))
        slopes = jacobian(residuals, theta)
        hessian = slopes.T @ (robust[:, None] * slopes) + PRIOR * np.eye(len(theta))
        gradient = slopes.T @ (robust * residual) + PRIOR * theta
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
        tried = np.clip(theta + step, -MOST, MOST)
        after = residuals(tried)
        if loss(after, tried) < loss(residual, theta):
            moved = float(np.abs(tried - theta).max())
            theta, residual, damping = tried, after, max(1e-9, damping / 5)
            if moved < 1e-5:
                break
        else:
            damping *= 8
            if damping > 1e9:
                break
    return theta
