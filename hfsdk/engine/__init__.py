"""Execution: the controller, the workers, both engines and both runtimes."""
