"""A Megatron ``GPTModel`` as hfsdk uses it, and its weights in the Hugging Face format.

The model's forward runs the decoder over rows packed one behind the other and the output layer only where it is needed: at the
positions that predict a response token (or, for a reward model, at the last token)::

    tokens [t]  ->  hidden [t, 1, h]  ->  selected positions [n, h]  ->  logits [n, V / tp]  or  values [n, 1]

Weights go in and out by the boxes of :mod:`hfsdk.resharding.reshard_plan`, so each rank reads only what it holds.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
    _yarn_linear_ramp_mask,
)
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
from torch.nn.functional import scaled_dot_product_attention, silu

from hfsdk.core.errors import OptionError
from hfsdk.core.lora import AdapterSpec, LoRA
from hfsdk.core.rope import RopeScaling, YarnScaling
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.training import cpu_support_megatron, megatron_adapters, megatron_optimizer, megatron_sequence
from hfsdk.engine.training.megatron_groups import RoleGroups
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
        config: the layer's config.
        output_bias: whether attention's output has a bias; Megatron has one option for that and for the MLP.
        options: options of the original.
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
        own_heads = heads[:, :, kv_head]  # its query heads, its key head, its value head
        queries = self.config.num_attention_heads // tp.size()
        query, key = own_heads[:, :, part * queries : (part + 1) * queries], own_heads[:, :, -2:-1]
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, own_heads[:, :, -1:]


class SelectiveGPTModel(GPTModel):
    """``GPTModel`` whose output layer runs on selected positions only.

    Attributes:
        adapters: the ones that are trained in place of the weights; ``None`` where there are none.
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
            offsets: the positions where the rows begin, and where the last ends; [rows + 1], on the CPU.
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
        return out.squeeze(1)  # its own place for the gradient, as an index has, would be as large as the logits


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
    vars(config).update(attention_options(spec))
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
        max_positions: tokens of the longest row.
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
    stretch(model.rotary_pos_emb, spec)
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
        # Megatron's gradient norm counts a parameter on each tp rank where it is cut, and once where it is whole: it asks these
        # attributes.
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
    """Return the modules of this rank's layers: Megatron's local ones, with other attention and norms."""
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
    # Drawn on the CPU: generators of devices draw other numbers from the same seed.
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


# -- stretched rotary positions, as transformers computes them


def attention_options(spec: ModelSpec) -> dict[str, float]:
    """Return the entries of its configuration by which Megatron's attention multiplies cosines and sines with yarn's factor.

    It computes 0.1 m ln(s) + 1 of a weight m and a factor s; with ln(s) = 1 any attention factor is one of those.
    """
    if not isinstance(spec.rope_scaling, YarnScaling):
        return {}
    weight = 10.0 * (spec.rope_scaling.attention - 1.0)
    return {"yarn_rotary_scaling_factor": math.e, "yarn_mscale": weight, "yarn_mscale_all_dim": 0.0}


def stretch(rotary: RotaryEmbedding, spec: ModelSpec) -> None:
    """Give a rotary embedding the waves of the model; one of rope type ``default`` keeps its own.

    Megatron's own options take a part of the numbers: for llama3 the factor alone, for yarn no attention factor. So the waves are
    put into its rotary embedding once it is made, and the attention factor goes where its attention looks for one.
    """
    scaling = spec.rope_scaling
    if isinstance(scaling, RopeScaling):
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
        )
    elif isinstance(scaling, YarnScaling):
        rotary.inv_freq = yarn_rates(scaling, spec.rope_theta, spec.head_dim, rotary.inv_freq.device)


def yarn_rates(scaling: YarnScaling, theta: float, dim: int, device: Any) -> torch.Tensor:
    """Return the radians that each pair of dimensions turns a token, [dim / 2] (YaRN, arXiv 2309.00071, section 3.2)."""
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    low, high = _yarn_find_correction_range(
        scaling.beta_fast, scaling.beta_slow, dim, theta, scaling.original_max_positions, scaling.truncate
    )
    unstretched = 1 - _yarn_linear_ramp_mask(low, high, dim // 2, device)
    rates: torch.Tensor = 1.0 / (scaling.factor * periods) * (1 - unstretched) + 1.0 / periods * unstretched
    return rates


# -- norm and activation, which keep little for the backward pass


class Norm(torch.nn.RMSNorm):
    """The norm that Megatron's local layers have, which refuse sequence parallelism (``torch_norm.py``).

    Composed of single operations they keep every step between. Of a layer, in numbers per token (h wide, MLP f wide)::

                     composed                                        here
        norm         x in float32, x / rms (where trained), normed   x
        gated MLP    gate, up, a copy of up, silu(gate), product     gate, up

    The rest is made again from these: a pass over memory each, and no matrix product. The next linear would keep the normed x and
    the product as its input (:func:`make_inputs_again`).

    Given by name everywhere, or else the last norm would be Transformer Engine's wherever that is installed. On GPUs torch has a
    kernel for it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x / rms(x) * weight, computed in float32, in the dtype of ``x``."""
        if x.device.type != "cpu":
            return super().forward(x)
        normed: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return normed


class _RMSNorm(torch.autograd.Function):
    """Scale x to h = x r, r = 1 / sqrt(mean(x^2) + eps): dx = r (g w - h mean(g w h)), dw = sum(g h)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        r = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return _RMSNorm.made_of(x, weight, r)

    @staticmethod
    def made_of(x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Return the output, of what is kept."""
        normed: torch.Tensor = (x * r).mul_(weight).to(x.dtype)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, r = ctx.saved_tensors
        h = x * r
        of_weight = (grad * h).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        slope = grad.float() * weight
        mean = (slope * h).mean(-1, keepdim=True)
        return slope.sub_(h.mul_(mean)).mul_(r).to(x.dtype), of_weight, None


def swiglu(halves: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (Shazeer, arXiv 2002.05202) of [..., gate and up]."""
    product: torch.Tensor = _SwiGLU.apply(halves)
    return product


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(halves)
        return _SwiGLU.made_of(halves)

    @staticmethod
    def made_of(halves: torch.Tensor) -> torch.Tensor:
        """Return the output, of what is kept."""
        gate, up = halves.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (halves,) = ctx.saved_tensors
        gate, up = halves.chunk(2, -1)
        gradient = torch.empty_like(halves)
        of_gate, of_up = gradient.chunk(2, -1)
        torch.mul(grad, silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return gradient


def make_inputs_again(linears: Iterable[torch.nn.Module]) -> None:
    """Have linears keep no output of :class:`Norm` or :func:`swiglu` for their backward pass: it is made again, bit for bit.

    Everything else that is multiplied with the input in a linear's forward hooks that are there by now, as adapters are, is kept so
    too.
    """
    for linear in linears:
        keeps = _Keeps()
        linear.register_forward_pre_hook(keeps.begin)
        linear.register_forward_hook(keeps.end, always_call=True)


class _Keeps:
    """Hooks of a linear that save the step which makes a tensor in place of the tensor, where that is possible."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def begin(self, *_: Any) -> None:
        """Enter the saving hooks before the linear runs."""
        hooks = torch.autograd.graph.saved_tensors_hooks(_instead, _again)
        hooks.__enter__()
        self._open.append(hooks)

    def end(self, *_: Any) -> None:
        """Leave the saving hooks after the linear, whether it failed or not."""
        if self._open:
            self._open.pop().__exit__(None, None, None)


@dataclass(frozen=True)
class _Recomputed:
    """The stand-in for an output: the step that made it, which has all it needs to run again, and the shape that is wanted."""

    by: Any
    shape: torch.Size


def _instead(tensor: torch.Tensor) -> torch.Tensor | _Recomputed:
    """Return the object that is kept for a tensor: itself, or how to compute it again."""
    whole = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    by = whole.grad_fn
    if (
        # Only a whole output of these two can be made again; a part of one, or another order, is kept as it is.
        getattr(by, "_forward_cls", None) not in (_RMSNorm, _SwiGLU)
        or whole.numel() != tensor.numel()
        or not tensor.is_contiguous()
    ):
        return tensor
    return _Recomputed(by, tensor.shape)


def _again(saved: torch.Tensor | _Recomputed) -> torch.Tensor:
    """Return the tensor from the kept object, computed again where that is needed."""
    if isinstance(saved, torch.Tensor):
        return saved
    made: torch.Tensor = saved.by._forward_cls.made_of(*saved.by.saved_tensors)
    return made.view(saved.shape)


# -- causal attention within packed rows

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
"""Queries, keys, values [tokens, heads, head_dim]; offsets of the rows, [rows + 1], on the CPU; scale; window -> as the queries.

A token sees the last ``window`` tokens of its row up to itself, or with ``None`` all of them."""

FLASH_HEAD_DIM = 256
"""The widest head of the kernel for packed rows."""


class PackedAttention(torch.nn.Module):
    """The core attention of packed rows, in place of Megatron's; on CPU and CUDA.

    A micro-batch of rows of 5, 3 and 2 tokens is one sequence of 10, and every layer but this one treats its tokens alike::

        offsets   0         5     8   10
        tokens    a a a a a b b b c c          a sees a only, b only b, c only c

    Padded to the longest row the same micro-batch would have 15 tokens. Megatron's own local core attention builds the whole score
    matrix and refuses packed rows; its fast one needs Transformer Engine.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        self.scale: float = config.kv_channels**-0.5
        self.window: int | None = config.window_size[0] + 1 if config.window_size else None  # Megatron counts those before

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Attend; tensors are [tokens, 1, heads, head_dim], the result is [tokens, 1, heads * head_dim].

        ``attention_mask`` says which token sees which in short: the offsets of the rows, [rows + 1], on the CPU. It comes as an
        argument because activation recompute passes arguments on, and nothing else.
        """
        attend = choose(query.device.type, query.dtype, query.shape[-1])
        heads = attend(query[:, 0], key[:, 0], value[:, 0], attention_mask, self.scale, self.window)
        return heads.flatten(1)[:, None]


def choose(device_type: str, dtype: torch.dtype, head_dim: int) -> Attend:
    """Return how to attend: on a GPU without padding where the kernel takes the numbers, which are 16 bits wide. Pure."""
    if device_type == "cpu":
        return attend_row_by_row
    flash = dtype in (torch.float16, torch.bfloat16) and head_dim <= FLASH_HEAD_DIM and head_dim % 8 == 0
    return attend_packed if flash and has_packed_kernel() else attend_in_one


@lru_cache
def has_packed_kernel() -> bool:
    """Whether this torch has the kernel with groups of query heads, and a causal window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attend within each row by FlashAttention's kernel for rows of any length: nothing is padded, nothing is O(longest^2)."""
    from torch.nn.attention.varlen import varlen_attn

    longest = int(offsets.diff().max())
    starts = _once(offsets, query.device, _starts)
    seen = (-1 if window is None else window - 1, 0)
    heads = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scale, window_size=seen, enable_gqa=True)
    assert isinstance(heads, torch.Tensor)  # a pair only where more is asked for
    return heads


def _once(offsets: torch.Tensor, device: torch.device, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the tensor that ``make`` makes of the offsets, on the device; once a micro-batch, since every layer needs it."""
    made: dict[object, torch.Tensor] | None = getattr(offsets, "made", None)
    if made is None:
        made = offsets.made = {}  # type: ignore[attr-defined]
    if (make, device) not in made:
        made[make, device] = make(offsets).to(device, non_blocking=True)
    return made[make, device]


def _starts(offsets: torch.Tensor) -> torch.Tensor:
    """Return the offsets as the kernel for packed rows reads them."""
    return offsets.to(torch.int32)


def _places(offsets: torch.Tensor) -> torch.Tensor:
    """Return where each token is once rows are padded to the longest and laid one behind the other."""
    lengths = offsets.diff()
    shift = torch.arange(len(lengths)) * lengths.max() - offsets[:-1]
    return torch.arange(int(offsets[-1])) + shift.repeat_interleave(lengths)


def _mask(length: int, window: int | None, device: torch.device) -> dict[str, Any]:
    """Return who sees whom in a row, as PyTorch's attention is told: a mask only where the window is shorter than the row."""
    if window is None or length <= window:
        return {"is_causal": True}
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)}


def attend_row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attend within each row; tensors are [tokens, heads, head_dim]. It costs least where a call costs little: on a CPU.

    Rows are split, not sliced one by one, or the gradient of each would be as long as all of them; rows of one length need one
    call. Values are a part of the fused rows of q, k and v, and are copied, or all of those would be kept for the backward pass.
    """
    lengths = offsets.diff().tolist()
    if len(set(lengths)) == 1:
        q, k, v = (x.unflatten(0, (-1, lengths[0])).transpose(1, 2) for x in (query, key, value.contiguous()))
        out = scaled_dot_product_attention(q, k, v, **_mask(lengths[0], window, q.device), scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value.contiguous())), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, **_mask(q.shape[2], window, q.device), scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def attend_in_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """The same in one call, for devices where many small ones cost more: rows are padded for this call only.

    Causal rows need no mask: a token never sees the padding behind it.
    """
    lengths = offsets.diff()
    longest, count = int(lengths.max()), len(lengths)
    place = _once(offsets, query.device, _places)
    q, k, v = (
        x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, place, x).unflatten(0, (count, longest)).transpose(1, 2)
        for x in (query, key, value)
    )
    out = scaled_dot_product_attention(q, k, v, **_mask(longest, window, q.device), scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, place)
