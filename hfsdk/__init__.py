"""hfsdk: RLHF you can step through. One notebook cell is one node of the dataflow, on Megatron-core, vLLM and Ray.

Start with ``hf.Session(devices=2)`` or ``hf.Session.simulated("16x8 A100-80GB")``; ``hf.doctor()`` says what this machine has.
"""

from __future__ import annotations

import importlib
import sys
from opcode import opmap
from typing import TYPE_CHECKING, Any

from hfsdk.doctor.machine import doctor  # at once: loaded later, the module would hide the function
from hfsdk.engine.process.interrupts import held

if TYPE_CHECKING:
    from hfsdk import data, testing, viz
    from hfsdk.algorithms import (
        CISPO,
        DAPO,
        DPO,
        DPPO,
        GDPO,
        GMPO,
        GPG,
        GRPO,
        GSPO,
        OPO,
        PPO,
        RLOO,
        SAPO,
        BradleyTerry,
        ClipCov,
        CostLoss,
        CrossEntropy,
        Distillation,
        DrGRPO,
        KLCov,
        OverlongPenalty,
        PassAtK,
        PassAtKTraining,
        ProcessGRPO,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        ReMax,
        SafeRLHF,
    )
    from hfsdk.configs.explain import explain
    from hfsdk.core import protocol as protocols
    from hfsdk.core.batch import Batch
    from hfsdk.core.cluster import ClusterSpec, DeviceSpec
    from hfsdk.core.dataflow import Call, Dataflow
    from hfsdk.core.errors import (
        CallCancelledError,
        CallError,
        CheckpointError,
        ColumnError,
        DependencyError,
        DeviceMemoryError,
        HfsdkError,
        InvariantWarning,
        LayoutError,
        LostColumnError,
        ModelNotFoundError,
        NonFiniteLossError,
        OptionError,
        OutputError,
        PlacementError,
        RewardFunctionError,
        SessionClosedError,
        SessionInUseError,
        SimulatedValueError,
        StaleBatchError,
        UnsupportedModelError,
        WeightMismatchError,
        WorkerDiedError,
    )
    from hfsdk.core.experiment import Experiment
    from hfsdk.core.first_bad import FirstBad
    from hfsdk.core.history import History
    from hfsdk.core.layout import Layout
    from hfsdk.core.lora import LoRA
    from hfsdk.core.pending import Metrics
    from hfsdk.core.placement import Placement, Pool
    from hfsdk.core.plan import Plan, Workload
    from hfsdk.core.protocol import TransferProtocol
    from hfsdk.core.response_lengths import ResponseLengths
    from hfsdk.core.roles import AdamW, RolloutOptions
    from hfsdk.core.snapshot import Snapshot
    from hfsdk.core.spec import Experts, LatentAttention, ModelSpec
    from hfsdk.core.table import Ragged, Table
    from hfsdk.core.trace import Span, Trace
    from hfsdk.diagnose.replay import StepReplay, replay
    from hfsdk.kept.attach import sessions
    from hfsdk.models import Primitive, primitive
    from hfsdk.planner.perf.perf_model import PerfModel
    from hfsdk.planner.tails.long_tails import long_tails
    from hfsdk.resharding.reshard_plan import ReshardPlan
    from hfsdk.run.best import KeepBest
    from hfsdk.run.run import Run
    from hfsdk.run.trackers import MLflow, TensorBoard, WandB
    from hfsdk.session.session import Session
    from hfsdk.session.streams import PromptStream

__version__ = "0.1.0"

_NAMES = {
    "algorithms": (
        "CISPO DAPO DPO DPPO GDPO GMPO GPG GRPO GSPO OPO PPO RLOO SAPO BradleyTerry ClipCov CostLoss CrossEntropy Distillation "
        "DrGRPO KLCov OverlongPenalty PassAtK PassAtKTraining ProcessGRPO ReMax ReinforcePlusPlus ReinforcePlusPlusBaseline "
        "SafeRLHF"
    ),
    "configs.explain": "explain",
    "diagnose.replay": "StepReplay replay",
    "core.batch": "Batch",
    "core.dataflow": "Call Dataflow",
    "core.errors": (
        "CallCancelledError CallError CheckpointError ColumnError DependencyError DeviceMemoryError HfsdkError InvariantWarning "
        "LayoutError LostColumnError ModelNotFoundError NonFiniteLossError OptionError OutputError PlacementError "
        "RewardFunctionError SessionClosedError SessionInUseError SimulatedValueError StaleBatchError "
        "UnsupportedModelError WeightMismatchError WorkerDiedError"
    ),
    "core.experiment": "Experiment",
    "core.first_bad": "FirstBad",
    "core.history": "History",
    "core.layout": "Layout",
    "core.pending": "Metrics",
    "core.placement": "Placement Pool",
    "core.plan": "Plan Workload",
    "core.protocol": "TransferProtocol",
    "core.response_lengths": "ResponseLengths",
    "core.lora": "LoRA",
    "core.roles": "AdamW RolloutOptions",
    "core.snapshot": "Snapshot",
    "core.cluster": "ClusterSpec DeviceSpec",
    "core.spec": "Experts LatentAttention ModelSpec",
    "core.table": "Ragged Table",
    "core.trace": "Span Trace",
    "models": "Primitive primitive",
    "planner.perf.perf_model": "PerfModel",
    "planner.tails.long_tails": "long_tails",
    "resharding.reshard_plan": "ReshardPlan",
    "kept.attach": "sessions",
    "run.best": "KeepBest",
    "run.run": "Run",
    "run.trackers": "MLflow TensorBoard WandB",
    "session.session": "Session",
    "session.streams": "PromptStream",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Public name -> the module it comes from, loaded when the name is first used."""

_MODULES = {"data": "data", "protocols": "core.protocol", "testing": "testing", "viz": "viz"}

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "DPPO",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "OPO",
    "PPO",
    "RLOO",
    "SAPO",
    "AdamW",
    "Batch",
    "BradleyTerry",
    "Call",
    "CallCancelledError",
    "CallError",
    "CheckpointError",
    "ClipCov",
    "ClusterSpec",
    "ColumnError",
    "CostLoss",
    "CrossEntropy",
    "Dataflow",
    "DependencyError",
    "DeviceMemoryError",
    "DeviceSpec",
    "Distillation",
    "DrGRPO",
    "Experiment",
    "Experts",
    "FirstBad",
    "HfsdkError",
    "History",
    "InvariantWarning",
    "KLCov",
    "KeepBest",
    "LatentAttention",
    "Layout",
    "LayoutError",
    "LoRA",
    "LostColumnError",
    "MLflow",
    "Metrics",
    "ModelNotFoundError",
    "ModelSpec",
    "NonFiniteLossError",
    "OptionError",
    "OutputError",
    "OverlongPenalty",
    "PassAtK",
    "PassAtKTraining",
    "PerfModel",
    "Placement",
    "PlacementError",
    "Plan",
    "Pool",
    "Primitive",
    "ProcessGRPO",
    "PromptStream",
    "Ragged",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",

    "ReshardPlan",
    "ResponseLengths",
    "RewardFunctionError",
    "RolloutOptions",
    "Run",
    "SafeRLHF",
    "Session",
    "SessionClosedError",
    "SessionInUseError",
    "SimulatedValueError",
    "Snapshot",
    "Span",
    "StaleBatchError",
    "StepReplay",
    "Table",
    "TensorBoard",
    "Trace",
    "TransferProtocol",
    "UnsupportedModelError",
    "WandB",
    "WeightMismatchError",
    "WorkerDiedError",
    "Workload",
    "data",
    "doctor",
    "explain",
    "long_tails",
    "primitive",
    "protocols",
    "replay",
    "sessions",
    "testing",
    "viz",
]  # fmt: skip


_SFT = "it is a loss: actor.update(batch, hf.CrossEntropy()), with batches of session.demonstrations(data)"
_ELSEWHERE = {
    **dict.fromkeys(("SFT", "SFTTrainer", "SFTConfig"), _SFT),
    **dict.fromkeys(("Distillation", "GKD", "GKDTrainer", "GKDConfig"), "hf.Distillation(), with session.reference(the teacher)"),
    **dict.fromkeys(("TIS", "MIS", "IcePop"), "it is an option of every algorithm with a ratio: hf.GRPO(tis_cap=2.0)"),
    "LoraConfig": "hf.LoRA(rank=16, alpha=32), given as session.actor(..., lora=...)",
    "Trainer": "a session trains: session.train(hf.PPO(), prompts, steps=50), or hf.GRPO(), hf.DPO(), ... in its place",
    "Config": "options are an algorithm's, e.g. hf.PPO(clip=0.2), or a model's: session.actor(model, optimizer=hf.AdamW(lr=1e-5))",
    "WithValueHead": "values come from a model of their own: session.critic(model)",
}  # fmt: skip
"""Endings of names of TRL -> what does that here."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _HOMES:
        hint = next((said for ending, said in _ELSEWHERE.items() if name.endswith(ending)), f"it has {', '.join(__all__)}")
        frame = sys._getframe(1)  # `from hfsdk import X` drops what an AttributeError says
        imported = frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
        raise (ImportError if imported else AttributeError)(f"hfsdk has no {name!r}; {hint}")
    with held():  # a process cannot import NumPy again once a Ctrl-C has met its import
        module = importlib.import_module(f"hfsdk.{_MODULES.get(name) or _HOMES[name]}")
    globals()[name] = value = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__", "algorithms"})


def _register_displays() -> None:
    """Teach IPython to draw hfsdk's nouns, where it is running."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    from hfsdk.viz.hooks import register

    register(shell)


_register_displays()
