"""The exercises of the notebooks, and runs in which something is wrong.

May import: core, algorithms, session.
"""
