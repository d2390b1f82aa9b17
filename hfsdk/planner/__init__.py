"""Prediction: time and memory of a plan. Knows no runtime.

May import: core.
"""
