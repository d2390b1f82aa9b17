"""A Megatron ``GPTModel`` as hfsdk uses it, and its weights in the Hugging Face format.

The model's forward runs the decoder over rows packed one behind the other and the output layer only where it is needed: at the
positions that predict a response token (or, for a reward model, at the last token)::

    tokens [t]  ->  hidden [t, 1, h]  ->  selected positions [n, h]  ->  logits [n, V / tp]  or  values [n, 1]

Weights go in and out by the boxes of :mod:`hfsdk.resharding.reshard_plan`, so each rank reads only what it holds.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
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

from hfsdk.core.errors import OptionError
from hfsdk.core.lora import AdapterSpec, LoRA
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.training import cpu_support_megatron, megatron_adapters, megatron_optimizer, megatron_rope, megatron_sequence
from hfsdk.engine.training.lean_layers import Norm, make_inputs_again, swiglu
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.packed_attention import PackedAttention
from hfsdk.engine.training.shared_base import SharedWeights
from hfsdk.engine.weights.role_state import SCALAR_HEAD
from hfsdk.resharding.boxes import padded_vocab

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

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
    """``GPTModel`` whose output layer runs on selected positions only.

    Attributes:
        adapters: those that are trained in place of the weights; ``None`` where there are none.
    """

    adapters: AdapterSpec | None = None

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
        if embedded is not None and self.adapters is not None and torch.is_grad_enabled():
            embedded = embedded.detach().requires_grad_()  # or a layer that is computed again would pass no gradient on
        rotary = self.rotary_pos_emb(int(offsets.diff().max()))[positions_T]
        hidden = self.decoder(hidden_states=embedded, attention_mask=offsets, rotary_pos_emb=rotary)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:  # each tp rank has the whole gradient of what follows, and takes its part of it back
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp)
        hidden_NH = hidden.squeeze(1).index_select(0, selected_N)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        out, _ = self.output_layer(hidden_NH[:, None], weight=weight)
        return out.squeeze(1)  # a place of its own for the gradient, as an index has, would be as large as the logits


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
    # Megatron's MLP then gives its activation both halves at once; refused at first, where the activation is to be a known one
    vars(config).update(use_te_activation_func=True, activation_func=swiglu)
    return config


def build_model(
    spec: ModelSpec, groups: RoleGroups, head: str, dtype: str, max_positions: int, recompute: str = "",
    *, sequence_parallel: bool = False, lora: LoRA | None = None,
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
        lora: adapters to train in place of the weights.

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
    if lora is not None:
        megatron_adapters.attach(model, AdapterSpec.of(spec, lora), groups)
        if scalar and groups.is_last_stage:
            model.output_layer.requires_grad_(True)
    make_inputs_again(linear for layer in model.decoder.layers for linear in _linears_of(layer))
    return model


def _linears_of(layer: Any) -> tuple[torch.nn.Module, ...]:
    """Return those linears of a layer whose input is the output of a norm or of the MLP's activation."""
    return layer.self_attention.linear_qkv, layer.mlp.linear_fc1, layer.mlp.linear_fc2


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
    """Return ``{local name: data}`` of the role's own parameters on this rank: all, or its adapters and a scalar head.

    They have the names of :func:`~hfsdk.resharding.boxes.megatron_boxes`.
    """
    return {
        name: parameter.data for name, parameter in model.named_parameters()
        if getattr(model, "adapters", None) is None or megatron_adapters.is_adapter(name)
        or (name == SCALAR_HEAD and has_scalar_head(model))
    }  # fmt: skip


def base_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return ``{local name: data}`` of this rank's parameters but for adapters."""
    return {name: p.data for name, p in model.named_parameters() if not megatron_adapters.is_adapter(name)}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages that tensors lie on, each once; one that was emptied has none."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def memory_bytes(
    model: torch.nn.Module,
    ddp: DistributedDataParallel | None,
    optimizer: MegatronOptimizer | None,
    frozen: SharedWeights | None = None,
) -> dict[str, int]:
    """Return the bytes of ``weights``, ``gradients`` and ``optimizer`` (float32 masters included) on this rank.

    Weights that another role has too count with the first one that has them (``frozen``).
    """
    shared = 0 if frozen is None else storage_bytes(frozen.counted_elsewhere())
    return {
        "weights": storage_bytes(parameter.data for parameter in model.parameters()) - shared,
        "gradients": 0 if ddp is None else storage_bytes(megatron_optimizer.gradient_tensors(ddp)),
        "optimizer": 0 if optimizer is None else storage_bytes(megatron_optimizer.state_tensors(model, optimizer)),
    }
