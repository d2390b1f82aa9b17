"""Parts of ``why.py``: each has ``rows()``, its figures."""
