"""Hidden states before one token: the trainer's by hooks on its layers, and those of transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from hfsdk.assets.pretrained import load_config
from hfsdk.core.gap import HiddenStates
from hfsdk.core.table import Array, Ragged, Table
from hfsdk.engine.training.megatron_model import SelectiveGPTModel

Seen = dict[str, Array]
"""Place -> hidden state."""


@contextmanager
def watching(places: Mapping[str, torch.nn.Module], read: Callable[[Any], Array | None]) -> Iterator[Seen]:
    """Keep the result of ``read`` on the output of each module, by place, while the context lasts."""
    seen: Seen = {}

    def keep(place: str, module: torch.nn.Module, inputs: Any, out: Any) -> None:
        value = read(out)
        if value is not None:
            seen[place] = value

    hooks = [module.register_forward_hook(partial(keep, place)) for place, module in places.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def of_trainer(model: SelectiveGPTModel, position: int, tp_rank: int) -> Any:
    """Keep the trainer's hidden states at a position of the one sequence that it passes meanwhile; see :func:`watching`."""
    places: dict[str, torch.nn.Module] = {"embedding": model.embedding} if model.pre_process else {}
    places |= {f"layer {layer.layer_number - 1}": layer for layer in model.decoder.layers}
    if model.post_process:
        places["norm"] = model.decoder.final_layernorm
    cut = model.config.sequence_parallel

    def read(out: Any) -> Array | None:
        hidden = out[0] if isinstance(out, tuple) else out
        local = position - tp_rank * len(hidden) if cut else position
        return hidden[local, 0].detach().float().cpu().numpy() if 0 <= local < len(hidden) else None

    return watching(places, read)


def of_transformers(
    full: Mapping[str, torch.Tensor], folder: str, rows: Table, position: int, temperature: float
) -> list[HiddenStates]:
    """Pass a sequence through transformers' model on the host, in fp32 and in bf16.

    Args:
        full: the weights, under Hugging Face names.
        folder: the folder with its config.json.
        rows: the sequence, one row.
        position: the position whose hidden states are kept.
        temperature: the number that divides the logits.
    """
    from transformers import AutoModelForCausalLM

    prompt, response = rows.ragged("prompt")[0], rows.ragged("response")[0]
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
    state = {name: tensor.detach().cpu() for name, tensor in full.items()}
    config, states = load_config(folder), list[HiddenStates]()
    config.tie_word_embeddings = "lm_head.weight" not in state
    for engine, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            missing = set(model.load_state_dict(state, strict=False).missing_keys) - set(model.all_tied_weights_keys)
            assert not missing, f"transformers lacks {sorted(missing)[:4]}"
            inner = model.model
            places = {"embedding": inner.embed_tokens, "norm": inner.norm}
            places |= {f"layer {number}": layer for number, layer in enumerate(inner.layers)}
            with watching(places, partial(_at, position)) as seen:
                logits = model.eval()(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
        chosen = log_probs.gather(1, tokens[len(prompt) :, None])[:, 0]
        states.append(HiddenStates(engine, seen, chosen.numpy()))
    return states


def _at(position: int, out: Any) -> Array:
    hidden = out[0] if isinstance(out, tuple) else out
    at_position: Array = hidden.reshape(-1, hidden.shape[-1])[position].float().numpy()
    return at_position


def one_row(prompt: Array, response: Array) -> Table:
    """Return a sequence as a table."""
    return Table({"prompt": Ragged.of([prompt], np.int32), "response": Ragged.of([response], np.int32)})
