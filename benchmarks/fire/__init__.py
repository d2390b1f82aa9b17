"""The campaign's kinds of fire, a module each; ``benchmarks/under_fire.py`` runs them."""
