"""A Megatron ``GPTModel`` as hfsdk uses it, and its weights in the Hugging Face format.

The model's forward runs the decoder over rows packed one behind the other and the output layer only where it is needed: at the
positions that predict a response token (or, for a reward model, at the last token)::

    tokens [t]  ->  hidden [t, 1, h]  ->  selected positions [n, h]  ->  logits [n, V / tp]  or  values [n, 1]

Weights go in and out by the boxes of :mod:`hfsdk.resharding.reshard_plan`, so each rank reads only what it holds.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors import safe_open
from safetensors.torch import save_file

from hfsdk.core.errors import CheckpointError, ModelNotFoundError, OptionError
from hfsdk.core.layout import Coordinates
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.training import cpu_support_megatron, megatron_optimizer, megatron_rope, megatron_sequence
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.packed_attention import PackedAttention
from hfsdk.engine.weights.role_state import SCALAR_HEAD
from hfsdk.resharding.boxes import SCALAR_HEAD_NAMES, Box, megatron_boxes, padded_vocab

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    "generation_config.json",
)  # fmt: skip
"""Files copied beside the weights."""

WEIGHTS, PARTIAL = "model.safetensors", ".hfsdk-export.partial"
"""Name of the file of weights, and of the folder in which a model's files are written until all are complete."""

_PARTITIONS = (
    ("word_embeddings.weight", 0, 1), ("output_layer.weight", 0, 1), ("linear_qkv.weight", 0, 1),
    ("linear_proj.weight", 1, 1), ("linear_fc1.weight", 0, 2), ("linear_fc2.weight", 1, 1),
)  # fmt: skip
"""(end of a name, dim that tp cuts, stride), as Megatron's own initialisation, which is skipped, would mark them.

Biases are marked where they are made.
"""


class ScalarHead(torch.nn.Module):
    """One number per position, in float32, the same on every tensor-parallel rank."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32, device=device))

    def forward(self, hidden: torch.Tensor, weight: None = None) -> tuple[torch.Tensor, None]:
        """Return ([..., 1] values, no bias), the form of Megatron's output layers."""
        return torch.nn.functional.linear(hidden.float(), self.weight), None


class Norm(torch.nn.RMSNorm):
    """The norm that Megatron's local layers have, which refuse sequence parallelism (``torch_norm.py``).

    Given by name everywhere, or else the last norm would be Transformer Engine's wherever that is installed.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


class GroupedSelfAttention(SelfAttention):
    """Megatron's self-attention where tp is a multiple of the kv heads: there the original asks the global groups.

    tp ranks then share a kv head: each takes its queries and the shared key and value out of the gathered fused rows.

    Args:
        config: of the layer.
        output_bias: whether attention's output has a bias; Megatron has one option for that and for the MLP.
        options: of the original.
    """

    def __init__(self, config: TransformerConfig, *, output_bias: bool, **options: Any) -> None:
        if config.add_bias_linear != output_bias:
            config = copy.copy(config)
            config.add_bias_linear = output_bias
        super().__init__(config, **options)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, each [sequence, batch, heads of this rank, head_dim]."""
        tp, kv_heads, dim = self.pg_collection.tp, self.config.num_query_groups, self.config.kv_channels
        if kv_heads >= tp.size():
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        fused, _ = self.linear_qkv(hidden_states)
        heads = all_gather_last_dim_from_tensor_parallel_region(fused, tp).unflatten(-1, (kv_heads, -1, dim))
        kv_head, part = divmod(tp.rank(), tp.size() // kv_heads)
        mine = heads[:, :, kv_head]  # its query heads, its key head, its value head
        queries = self.config.num_attention_heads // tp.size()
        query, key = mine[:, :, part * queries : (part + 1) * queries], mine[:, :, -2:-1]
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, mine[:, :, -1:]


class SelectiveGPTModel(GPTModel):
    """``GPTModel`` whose output layer runs on selected positions only."""

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, offsets: torch.Tensor, selected_N: torch.Tensor
    ) -> torch.Tensor:
        """Return [N, columns]: this rank's logits, or [N, 1] values, at the selected places.

        A pipeline stage before the last returns its hidden states, [T, 1, hidden]; with sequence parallelism, which needs tp to
        divide T, this rank's part of them, [T / tp, 1, hidden].

        Args:
            tokens_T: rows packed one behind the other.
            positions_T: each token's position in its row.
            offsets: where the rows begin, and where the last ends; [rows + 1], on the CPU.
            selected_N: places in ``tokens_T``.
        """
        embedded = self.embedding(input_ids=tokens_T[None], position_ids=None) if self.pre_process else None
        rotary = self.rotary_pos_emb(int(offsets.diff().max()))[positions_T]
        hidden = self.decoder(hidden_states=embedded, attention_mask=offsets, rotary_pos_emb=rotary)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:  # each tp rank has the whole gradient of what follows, and takes its part of it back
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp)
        hidden_NH = hidden[:, 0].index_select(0, selected_N)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        out, _ = self.output_layer(hidden_NH[:, None], weight=weight)
        return out[:, 0]


RECOMPUTE: dict[str, dict[str, Any]] = {
    "": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""``RoleSpec.recompute`` in Megatron's words."""


def _config(spec: ModelSpec, groups: RoleGroups, dtype: torch.dtype, recompute: str, sequence_parallel: bool) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=spec.num_layers, hidden_size=spec.hidden_size, ffn_hidden_size=spec.mlp_hidden_size,
        num_attention_heads=spec.num_heads, num_query_groups=spec.num_kv_heads, kv_channels=spec.head_dim,
        layernorm_epsilon=spec.norm_eps, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=spec.mlp_bias, add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm, hidden_dropout=0.0, attention_dropout=0.0,
        window_size=None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        use_cpu_initialization=not torch.cuda.is_available(), perform_initialization=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, attention_softmax_in_fp32=True, cuda_graph_scope=[],
        tensor_model_parallel_size=groups.tp_size, pipeline_model_parallel_size=groups.pp_size,
        params_dtype=dtype, pipeline_dtype=dtype, autocast_dtype=dtype, bf16=dtype == torch.bfloat16,
        sequence_parallel=sequence_parallel, batch_p2p_comm=True, batch_p2p_sync=False, variable_seq_lengths=groups.pp_size > 1,
        moe_token_dispatcher_type="alltoall", deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        calculate_per_token_loss=True,  # gradients are summed over dp, never averaged
        **RECOMPUTE[recompute],
    )  # fmt: skip
    vars(config).update(megatron_rope.attention_options(spec))
    return config


def build_model(
    spec: ModelSpec, groups: RoleGroups, head: str, dtype: str, max_positions: int, recompute: str = "",
    *, sequence_parallel: bool = False,
) -> SelectiveGPTModel:  # fmt: skip
    """Build this rank's part of the model; weights are unset until :func:`load_folder`.

    Args:
        spec: the architecture.
        groups: the role's process groups; megatron's global ones are never asked.
        head: ``"lm"`` or ``"scalar"`` (a float32 [1, hidden] layer in place of the logits, zero at first).
        dtype: ``"fp32"`` or ``"bf16"``.
        max_positions: longest row.
        recompute: activations to compute again in the backward pass, as :class:`~hfsdk.core.roles.RoleSpec` has it.
        sequence_parallel: whether norms and residuals are cut over tp, which must be above 1.

    Raises:
        LayoutError: the layout does not fit the model.
        OptionError: unknown head or dtype.
    """
    if head not in ("lm", "scalar") or dtype not in DTYPES:
        raise OptionError(f"head must be 'lm' or 'scalar' and dtype one of {sorted(DTYPES)}; got {head!r}, {dtype!r}")
    groups.mesh.layout.check_model(spec)
    cpu_support_megatron.install()
    scalar = head == "scalar"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine's attention, which is not used, needs no recompute
        config = _config(spec, groups, DTYPES[dtype], recompute, sequence_parallel)
    # a scalar head takes the output layer's place: "tied" makes none, but between stages it would tie what is not there
    tied = groups.pp_size == 1 if scalar else spec.tied_embeddings
    model = SelectiveGPTModel(
        config=config, transformer_layer_spec=_layers(spec, groups),
        vocab_size=padded_vocab(spec.vocab_size, groups.tp_size), max_sequence_length=max_positions,
        pre_process=groups.is_first_stage, post_process=groups.is_last_stage,
        parallel_output=True, share_embeddings_and_output_weights=tied,
        position_embedding_type="rope", rotary_base=spec.rope_theta, pg_collection=groups.collection(),
    )  # fmt: skip
    megatron_rope.stretch(model.rotary_pos_emb, spec)
    model.to(groups.device, DTYPES[dtype])
    model.scalar = scalar
    if scalar:
        model.share_embeddings_and_output_weights = False
        if groups.is_last_stage:
            model.output_layer = ScalarHead(spec.hidden_size, groups.device)
    if sequence_parallel:
        megatron_sequence.prepare(model)
    for name, parameter in model.named_parameters():
        partition = next((p for p in _PARTITIONS if name.endswith(p[0])), None)
        if partition and not (scalar and name == SCALAR_HEAD):
            set_tensor_model_parallel_attributes(parameter, True, partition[1], partition[2])
    return model


def _layers(spec: ModelSpec, groups: RoleGroups) -> TransformerBlockSubmodules:
    """Return what this rank's layers are made of: Megatron's local modules but for attention and norms."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=spec.qk_norm)
    parts, attention = layer.submodules, layer.submodules.self_attention
    attention.module, attention.submodules.core_attention = GroupedSelfAttention, PackedAttention
    attention.params["output_bias"] = spec.attention_bias
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if spec.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * (spec.num_layers // groups.pp_size), layer_norm=Norm)


def has_scalar_head(model: torch.nn.Module) -> bool:
    """Return whether the model, of which this rank may hold another stage, ends in a scalar head."""
    return bool(getattr(model, "scalar", False))


def init_scalar_head(model: SelectiveGPTModel, seed: int) -> None:
    """Draw the scalar head from N(0, 1 / (hidden + 1)), the same on every rank (Stiennon et al., arXiv 2009.01325)."""
    if not model.post_process:
        return
    weight = model.output_layer.weight
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(weight.shape, generator=generator) * (weight.shape[1] + 1) ** -0.5
    weight.data.copy_(drawn)


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return ``{local name: data}`` of this rank's parameters, as :func:`~hfsdk.resharding.boxes.megatron_boxes` names them."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _boxes(spec: ModelSpec, groups: RoleGroups, scalar: bool, at: Coordinates) -> list[Box]:
    boxes = megatron_boxes(spec, groups.mesh.layout, at.tp, at.pp)
    return [box for box in boxes if not (scalar and box.local == SCALAR_HEAD)]


def _part(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


class _WeightFiles:
    """The safetensors of a folder, opened as they are needed; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            self.files = dict.fromkeys(self._file(single.name).keys(), single.name)
        else:
            raise ModelNotFoundError(
                f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json. "
                "A model folder is what transformers' save_pretrained writes."
            )

    def __enter__(self) -> _WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            if not path.is_file():
                raise ModelNotFoundError(f"{self._folder} lists {name} in its index, but the file is missing.")
            self._open[name] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[name]

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        return self._file(self.files[name]).get_slice(name)[part]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self.files[name]).get_slice(name).get_shape())


@torch.no_grad()
def load_folder(model: SelectiveGPTModel, spec: ModelSpec, groups: RoleGroups, folder: str | Path) -> bool:
    """Read this rank's boxes from a folder's safetensors; padding rows become zero.

    Returns:
        Whether a scalar head was read (``score.weight`` or ``value_head.weight``); without one it stays as it is.

    Raises:
        ModelNotFoundError: no weights, or tensors missing or of another shape.
    """
    scalar = has_scalar_head(model)
    boxes = _boxes(spec, groups, scalar, groups.coordinates)
    local = local_tensors(model)
    with _WeightFiles(Path(folder)) as files:
        wanted = {name for name in spec.tensors() if not (scalar and name == "lm_head.weight")}  # of all stages
        missing = sorted(wanted - set(files.files))
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ModelNotFoundError(
                f"{folder} lacks {', '.join(missing[:3])}{more}; it has {len(files.files)} tensors. "
                f"The folder's weights are not those of {spec.name} ({spec.family})."
            )
        for name, shape in spec.tensors().items():
            if name in files.files and files.shape(name) != shape:
                raise ModelNotFoundError(f"{folder}: {name} has shape {files.shape(name)}; config.json says {shape}.")
        for name in ("embedding.word_embeddings.weight", SCALAR_HEAD):
            if name in local and not (scalar and name == SCALAR_HEAD):
                local[name].zero_()
        for box in boxes:
            target = local[box.local][_part(box.local_start, box.size)]
            target.copy_(files.read(box.tensor, _part(box.start, box.size)))
        found = next((name for name in SCALAR_HEAD_NAMES if name in files.files), None) if scalar else None
        if found:
            _check_scalar(files.shape(found), spec, folder, found)
            if SCALAR_HEAD in local:
                local[SCALAR_HEAD].copy_(files.read(found, _part((0, 0), (1, spec.hidden_size))))
    return found is not None


def _check_scalar(shape: tuple[int, ...], spec: ModelSpec, folder: str | Path, name: str) -> None:
    if shape != (1, spec.hidden_size):
        raise ModelNotFoundError(
            f"{folder}: {name} has shape {shape}; a scalar head has (1, {spec.hidden_size}), i.e. num_labels=1."
        )


def gather_tensors(
    local: Mapping[str, torch.Tensor], spec: ModelSpec, groups: RoleGroups, *, scalar: bool
) -> dict[str, torch.Tensor] | None:
    """Put tensors shaped like the parameters (weights, gradients) together under their Hugging Face names.

    Collective over the role. Returns CPU tensors on rank 0 and ``None`` elsewhere.
    """
    held = groups.gather_objects({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in local.items()})
    if groups.dp_rank != groups.mesh.coordinates(0).dp:
        return None
    shapes = spec.tensors()
    full: dict[str, torch.Tensor] = {}
    for rank in (world_rank - groups.first for world_rank in dist.get_process_group_ranks(groups.mp)):
        by_local = _by_local(_boxes(spec, groups, scalar, groups.mesh.coordinates(rank)))
        for name, (shape, dtype) in held[rank].items():
            shard = _from_rank(rank, local.get(name), shape, dtype, groups)
            for box in by_local.get(name, ()) if shard is not None else ():
                if box.tensor not in full:
                    full[box.tensor] = torch.empty(shapes[box.tensor], dtype=dtype)
                full[box.tensor][_part(box.start, box.size)] = shard[_part(box.local_start, box.size)].cpu()
            if shard is not None and scalar and name == SCALAR_HEAD:
                full[SCALAR_HEAD_NAMES[0]] = shard.cpu().clone()
    if groups.rank != 0:
        return None
    return {name: full[name] for name in (*shapes, SCALAR_HEAD_NAMES[0]) if name in full}


def _by_local(boxes: list[Box]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for box in boxes:
        found.setdefault(box.local, []).append(box)
    return found


def _from_rank(
    rank: int, mine: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, groups: RoleGroups
) -> torch.Tensor | None:
    """Bring ``rank``'s tensor to rank 0 of its replica; returns it there and ``None`` elsewhere."""
    if groups.rank == 0:
        if rank == 0:
            assert mine is not None
            return mine.detach()
        received = torch.empty(shape, dtype=dtype, device=groups.device)
        dist.recv(received, src=groups.first + rank, group=groups.mp)
        return received
    if groups.rank == rank:
        assert mine is not None
        dist.send(mine.detach().contiguous(), dst=groups.first, group=groups.mp)
    return None


def gather_full(model: SelectiveGPTModel, spec: ModelSpec, groups: RoleGroups) -> dict[str, torch.Tensor] | None:
    """Return the whole model under Hugging Face names on rank 0 (``None`` elsewhere), in its own dtype; collective."""
    return gather_tensors(local_tensors(model), spec, groups, scalar=has_scalar_head(model))


def save_folder(model: SelectiveGPTModel, spec: ModelSpec, groups: RoleGroups, folder: str | Path, source: str | Path) -> None:
    """Write the model so that transformers' ``from_pretrained`` (and :func:`load_folder`) reads it; collective.

    A scalar head makes it e.g. a ``LlamaForSequenceClassification`` with one label.

    Args:
        model: the model.
        spec: its architecture.
        groups: its process groups.
        folder: where to write; made if missing, files in it are replaced.
        source: the folder the model came from: its config.json and tokenizer files are copied.

    Raises:
        CheckpointError: on every rank, when it cannot be written; the files that were there are unchanged.
    """
    full = gather_full(model, spec, groups)
    problem: str | None = None
    if full is not None:
        try:
            _write(full, spec, Path(folder), Path(source), scalar=has_scalar_head(model))
        except Exception as caught:  # whatever it is, the other ranks wait to hear of it
            problem = f"{getattr(caught, 'strerror', None) or caught}"
    problems = [text for text in groups.gather_objects(problem) if text]
    if problems:
        raise CheckpointError(f"cannot write the model to {folder}: {problems[0]}; what was there before is unchanged")


def _write(full: dict[str, torch.Tensor], spec: ModelSpec, folder: Path, source: Path, *, scalar: bool) -> None:
    """Write every file into a folder beside their places, and when all are complete put them there, config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(full["model.norm.weight"].dtype).removeprefix("torch.")
    if scalar:
        config["architectures"] = [spec.class_name("scalar")]
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    needed, free = sum(tensor.nbytes for tensor in full.values()), shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"the model has {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB free")
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        for pattern in COMPANIONS:
            for path in source.glob(pattern):
                if path.is_file() and source.resolve() != folder.resolve():
                    shutil.copy2(path, partial / path.name)
        save_file(full, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in partial.iterdir():
            if (folder / path.name).is_dir():
                raise OSError(f"{folder / path.name} is a folder")
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        for path in sorted(partial.iterdir(), key=lambda path: (path.name == "config.json", path.name == WEIGHTS)):
            os.replace(path, folder / path.name)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)  # of a model in several files
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages that tensors lie on, each once; one that was emptied has none."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def memory_bytes(
    model: torch.nn.Module, ddp: DistributedDataParallel | None, optimizer: MegatronOptimizer | None
) -> dict[str, int]:
    """Return the bytes of ``weights``, ``gradients`` and ``optimizer`` (float32 masters included) on this rank."""
    return {
        "weights": storage_bytes(local_tensors(model).values()),
        "gradients": 0 if ddp is None else storage_bytes(megatron_optimizer.gradient_tensors(ddp)),
        "optimizer": 0 if optimizer is None else storage_bytes(megatron_optimizer.state_tensors(model, optimizer)),
    }
