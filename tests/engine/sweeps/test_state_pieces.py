"""Pieces of every layout's shares fill those of every other, of every model in both dtypes."""

import pytest
import torch
from test_role_state import LAYOUTS, MODELS, check_any_layout_from_any_other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_any_layout_from_any_other(model, dtype):
    check_any_layout_from_any_other(model, dtype, LAYOUTS)
