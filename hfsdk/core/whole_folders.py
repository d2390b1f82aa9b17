"""A folder's weights are those of its model, or of a model's adapters: each is there and in its form, and none is left over.

What a file has and nobody reads would be missing from what is computed and from what is saved, so it is an error too::

    config.json  ->  spec.tensors()     ==     tensors of the files     (but for REBUILT, and a head that is replaced)
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.lora import ADAPTER_CONFIG, MERGE, PEFT, AdapterSpec
from hfsdk.core.spec import SCALAR_HEAD_NAMES, ModelSpec
from hfsdk.core.tokenizer_files import TEMPLATES, TOKENIZER_CONFIG
from hfsdk.core.untrusted import has_file, read_file, read_json, where
from hfsdk.core.weight_files import EMBEDDING, HEAD, READ, WeightFiles

REBUILT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors that follow from config.json: older transformers saved them, and no version reads them."""

HINTS = (
    (r"absmax|quant_map|quant_state|SCB|weight_format|qweight|qzeros|scales|g_idx|weight_scale|weight_packed|input_scale|[kv]_scale",
     "It is of quantised weights; use a folder whose weights are not quantised."),
    (r"lora_|modules_to_save", "It is of adapters; merge them with peft (merge_and_unload), and save the model."),
    (r"score|v_head|value_head|classifier|reward_head|regression_head",
     f"A scalar head is read of critics and reward models, without a bias, by one name: {' or '.join(SCALAR_HEAD_NAMES)}."),
    (r"vision|visual|image|audio|speech|mm_|multi_modal", "It is of a tower for pictures or sounds; use a model of texts alone."),
)  # fmt: skip
"""Patterns of tensor names of models that hfsdk does not run -> advice."""


def check_model_weights(files: WeightFiles, spec: ModelSpec, *, scalar: bool = False) -> None:
    """Compare a folder's weights with a model.

    Args:
        files: the folder's files.
        spec: the model that they should have.
        scalar: whether a scalar head takes the place of a language model's.

    Raises:
        ModelNotFoundError: one is missing, has another shape, is none of floating point, or has no place in the model.
    """
    count = f"it has {len(files.files)} tensors. The folder's weights are not those of {spec.name} ({spec.family})."
    _check_there(files, spec, "", [HEAD] if scalar else [], count, "config.json says")
    heads = [name for name in SCALAR_HEAD_NAMES if scalar and name in files.files][:1]
    for name in heads:
        _check_head(files, spec, name)
    head = [HEAD] if scalar or spec.tied_embeddings else []  # replaced; or the embeddings once more, as from_folder saw
    unread = [name for name in _left_over(files, spec, "", (*heads, *head)) if not REBUILT.fullmatch(name)]
    if unread:
        place = where(files.folder, files.files[unread[0]])
        hint = next((words for pattern, words in HINTS if re.search(pattern, unread[0])), "Leave it out, or use another model.")
        raise ModelNotFoundError(f"{place} has {_listed(unread)}, which {spec.name} ({spec.family}) has not. {hint}")
    if head and not scalar and HEAD in files.files and not files.same(HEAD, EMBEDDING):
        raise ModelNotFoundError(f"{where(files.folder, files.files[HEAD])}: {HEAD} has changed meanwhile. Declare the role again.")


def check_adapter_weights(files: WeightFiles, spec: AdapterSpec, *, scalar: bool = False) -> None:
    """Compare a folder's adapters with those that a model needs.

    Args:
        files: the folder's files.
        spec: the model that they should have.
        scalar: whether the model has a scalar head, which may be saved with them.

    Raises:
        ModelNotFoundError: one is missing, has another shape, is none of floating point, or a tensor is none of them.
    """
    reason = f"{spec.name} needs it there. Adapters of another model, or of some of its layers alone, are not read. {MERGE}"
    _check_there(files, spec, PEFT, [], reason, f"{spec.name} needs")
    heads = [PEFT + SCALAR_HEAD_NAMES[0]] if scalar else []
    for name in heads:
        if name in files.files:
            _check_head(files, spec, name)
    unread = _left_over(files, spec, PEFT, heads)
    if unread:
        place = where(files.folder, files.files[unread[0]])
        raise ModelNotFoundError(f"{place} has {_listed(unread)}, which is no adapter of a layer of {spec.name}. {MERGE}")


def check_no_adapters(folder: str) -> None:
    """Check that a model's folder has no adapters next to its weights, which transformers would add to them.

    Raises:
        ModelNotFoundError: it has.
    """
    if has_file(folder, ADAPTER_CONFIG):
        raise ModelNotFoundError(
            f"{folder} has {ADAPTER_CONFIG} beside its weights, so that transformers would add its adapters to them. Give them too "
            f"(lora={folder!r}), or move them to a folder of their own."
        )


def own_template(adapters: str, folder: str) -> bool:
    """Whether a folder of adapters has a chat template, and another one than its model's: they were trained with it.

    Raises:
        ModelNotFoundError: a file of a tokenizer is damaged.
    """
    own = _template_of(adapters)
    return own is not None and own != _template_of(folder)


def _template_of(folder: str) -> Any:
    for name in TEMPLATES:
        if has_file(folder, name):
            return read_file(folder, name).decode(errors="replace").strip()
    template = read_json(folder, TOKENIZER_CONFIG).get("chat_template") if has_file(folder, TOKENIZER_CONFIG) else None
    return template.strip() if isinstance(template, str) else template


def _check_there(files: WeightFiles, spec: ModelSpec, before: str, replaced: Collection[str], reason: str, said: str) -> None:
    if spec.num_layers > len(files.files):  # of absurd numbers no list is made
        raise ModelNotFoundError(f"{files.source} lacks weights of {spec.num_layers:,} layers; {reason}")
    tensors = {before + name: shape for name, shape in spec.tensors().items() if name not in replaced}
    missing = sorted(name for name in tensors if name not in files.files)
    if missing:
        raise ModelNotFoundError(f"{files.source} lacks {_listed(missing)}; {reason}")
    for name, shape in tensors.items():
        _check_form(files, name, shape, said)


def _check_form(files: WeightFiles, name: str, shape: tuple[int, ...], said: str) -> None:
    stored, tensor = files.place(name), f"{where(files.folder, files.files[name])}: {name}"
    if stored.shape != shape:
        cause = " It is empty, as what ZeRO-3 or FSDP cut and did not gather is: save it again." if 0 in stored.shape else ""
        raise ModelNotFoundError(f"{tensor} has shape {stored.shape}; {said} {shape}.{cause}")
    if stored.dtype not in READ:
        raise ModelNotFoundError(
            f"{tensor} has dtype {stored.dtype}; models are loaded from {', '.join(READ)}. Use a folder whose weights are not "
            "quantised."
        )


def _check_head(files: WeightFiles, spec: ModelSpec, name: str) -> None:
    _check_form(files, name, (1, spec.hidden_size), "a scalar head, i.e. one of num_labels=1, has")


def _left_over(files: WeightFiles, spec: ModelSpec, before: str, others: Collection[str]) -> list[str]:
    """Return the names of tensors that are neither the spec's nor among others, sorted."""
    files.check_listed()
    expected = {before + name for name in spec.tensors()} | set(others)
    return sorted(name for name in files.files if name not in expected)


def _listed(names: list[str]) -> str:
    shown_names = ", ".join(name if name.isprintable() and len(name) < 200 else repr(name[:200]) for name in names[:3])
    return shown_names + (f" and {len(names) - 3} more" if len(names) > 3 else "")
