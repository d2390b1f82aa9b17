"""``ModelHandle``: the base of all handles. A handle is a role of the session: a model spread over a pool, or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from hfsdk.core.arguments import NO_ARGUMENTS, Arguments, Folder, Learning, OnRanks, OwnPrimitive
from hfsdk.core.batch import Batch, refs_of, with_written
from hfsdk.core.builtin import Method
from hfsdk.core.checks import Count, Index, Name, Within, check_fields, checked, shown
from hfsdk.core.conversations import Chat, Message
from hfsdk.core.errors import CheckpointError, ColumnError, OptionError
from hfsdk.core.files import as_path, is_ours, is_strangers
from hfsdk.core.functions import Shipped
from hfsdk.core.hints import HANDLE, AttributeHints
from hfsdk.core.layout import Layout
from hfsdk.core.learning_rates import WORDS, what_is_learned
from hfsdk.core.lora import ADAPTER_CONFIG
from hfsdk.core.methods import CALL, COMPUTE_LOSS, FORWARD_BACKWARD, GRAD_NORM, RUN, SAVE_PRETRAINED, STEP, UPDATE
from hfsdk.core.pending import Client, ColumnRef, Lease, Metrics, Value
from hfsdk.core.protocol import THREE_D, TransferProtocol
from hfsdk.core.roles import RoleSpec
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Table
from hfsdk.core.text import millions, printable
from hfsdk.core.untrusted import absolute
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.messages import Logs, Submit
from hfsdk.models.counters import Counters

Epochs = Annotated[int, Within(1, 10_000)]

Loss = Callable[..., Any]
"""``loss(out, b)`` -> a value per response token (or per sample), or such a value and a dict of metrics; see docs/methods.md."""


class OneRowMetrics(Metrics):
    """The numbers of one half of an update: a single row."""

    @property
    def rows(self) -> list[dict[str, float]]:
        """The one row; waits."""
        self.wait()
        return [self._client.result(self.call_ids[0])]


class Host(Protocol):
    """A session as handles need it; they stand below it and know nothing else of it."""

    @property
    def client(self) -> CallClient:
        """The client that calls are sent through."""
        ...

    @property
    def seed(self) -> int:
        """The session's seed, which calls without one of their own use."""
        ...

    @property
    def simulated(self) -> bool:
        """Whether seconds are those of a virtual clock."""
        ...

    @property
    def counters(self) -> Counters:
        """Numbers that are saved with the session."""
        ...

    def ready(self, handle: ModelHandle) -> None:
        """Place and load the handle's role where that has not happened; refuse a handle that was replaced or released."""
        ...

    def release(self, handle: ModelHandle) -> None:
        """Free the handle's role and forget it."""
        ...

    def notice(self, text: str) -> None:
        """Give the user a notice that is no failure."""
        ...

    def find_snapshot(self, snapshot: Snapshot | str) -> Snapshot:
        """Return a snapshot of the session by its name, or as it is."""
        ...


class ModelHandle(AttributeHints):
    """A role of the session. Made by ``session.actor(...)`` and its like; the same arguments give the same handle again."""

    kind: ClassVar[str] = ""
    _elsewhere = HANDLE

    def __init__(self, host: Host, role: RoleSpec) -> None:
        self._host = host
        self._role = role

    # -- what it is

    @property
    def name(self) -> str:
        """The role's name, unique in the session."""
        return self._role.name

    @property
    def role(self) -> RoleSpec:
        """The role as declared, with layouts filled in once it is placed."""
        return self._role

    @property
    def spec(self) -> ModelSpec | None:
        """The model's architecture; ``None`` for a function."""
        return self._role.model

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts by use: ``"train"`` (of training, or of inference for frozen models) and, for an actor, ``"rollout"``."""
        by_use = {"train": self._role.train, "rollout": self._role.rollout}
        return {use: layout for use, layout in by_use.items() if layout is not None}

    @property
    def version(self) -> int:
        """Optimizer updates the weights have seen since they were loaded; 0 for frozen models. Asks the controller."""
        roles: Mapping[str, tuple[RoleSpec | None, str, int]] = self._client.send(q.Roles())
        spec, _, updates = roles.get(self.name, (None, "", 0))
        own = self._role
        if spec is not None and own.generated_by:  # the rollout is the shadow's
            spec = replace(
                spec, rollout=own.rollout, rollout_options=own.rollout_options, generated_by=own.generated_by, nodes=own.nodes
            )  # fmt: skip
        return updates if spec == own else 0  # another of this name may stand there, until this one is placed

    @property
    def memory(self) -> dict[int, int]:
        """Bytes this role takes on each rank: weights, gradients, optimizer state, rollout copy. Empty before it is loaded."""
        bytes_by_rank = {}
        for status in self._client.send(q.Devices()):
            if self.name in status.roles:
                bytes_by_rank[int(status.rank)] = int(status.roles[self.name])
        return bytes_by_rank

    @property
    def offloaded(self) -> dict[int, int]:
        """Bytes of this role that are in host memory on each rank now, instead of on the device (``offload=True``).

        While a call of the role needs them they are on the device, and this is 0. Empty where nothing is offloaded, or the role
        is not loaded.
        """
        by_rank: Mapping[int, Mapping[str, int]] = {int(s.rank): s.offloaded for s in self._client.send(q.Devices())}
        return {rank: int(roles[self.name]) for rank, roles in by_rank.items() if self.name in roles}

    def __repr__(self) -> str:
        model = str(self.spec) if self.spec else self._role.function.name if self._role.function else "?"
        words = [f"{use} '{layout}'" for use, layout in self.layouts.items()]
        words += [self._role.dtype] if self.spec else []
        words += [str(self._role.lora)] if self._role.lora else []
        words += [f"{part} in host memory" for part in self._role.offloads]
        return printable(f"{type(self).__name__}({self.name!r}: {', '.join([model, *words])})")

    # -- what all can do

    @checked
    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(rank, *args)`` on every rank of the role, wait, and return what it returned, by rank.

        ``rank`` is the worker's own object: ``rank.rank``, ``rank.module``, ``rank.memory()``, ...; ``fn`` travels by value.
        Return small things: they come here. ``fn`` finds the trainer's weights on the device; should it change them, the next
        ``generate`` has them too (not a shadow on another pool, which follows updates alone).

        Raises:
            OptionError: the role is a function and has no ranks, or ``fn`` cannot be called.
            CallError: ``fn`` raised on a rank.
        """
        self._need_model("run a function on its ranks")
        shipped = Shipped.of(fn)
        return list(self._result(self._submit(RUN, OnRanks(function=shipped, values=args), waits=True)))

    @checked
    def call(self, primitive: Primitive, batch: Batch, **options: Any) -> Batch:
        """Run the user's own primitive (see :func:`hfsdk.primitive`) SPMD on the role's ranks and add what it writes.

        Args:
            primitive: a primitive made by ``@hf.primitive(reads=..., writes=..., protocol=...)``.
            batch: rows with the columns it reads.
            options: handed to the primitive's function as keyword arguments.

        Raises:
            ColumnError: the batch lacks a column that the primitive reads.
            OptionError: it is not a primitive, or the role has no ranks.
            CallError: at the first look: the function raised, or did not return the columns it said.
        """
        self._need_model(f"run the primitive {primitive.name!r}")
        inputs = self._need(batch, primitive.reads, primitive.name)
        shipped = Shipped.of(primitive.function)
        arguments = OwnPrimitive(function=shipped, writes=primitive.writes, keywords=options)
        lease = self._submit(replace(CALL, writes=primitive.writes, protocol=primitive.protocol), arguments, inputs, len(batch))
        return with_written(batch, lease, primitive.writes)

    @checked
    def logs(self, rank: Index = 0) -> str:
        """Return what the worker of ``rank`` has printed; of a function what all functions have, which share a process."""
        return str(self._client.send(Logs(self.name, rank)))

    def release(self) -> None:
        """Free the role's memory and forget it; the handle cannot be used afterwards."""
        self._host.release(self)

    # -- for the handles

    @property
    def _client(self) -> CallClient:
        return self._host.client

    def _submit(
        self,
        method: Method,
        arguments: Arguments = NO_ARGUMENTS,
        inputs: Mapping[str, ColumnRef] | None = None,
        num_rows: int = 0,
        *,
        timeout_s: float | None = None,
        role: str = "",
        waits: bool = False,
    ) -> Lease:
        """Start a call of this role, or of its shadow (``role``); ``waits``: and wait for it next."""
        self._host.ready(self)
        message = Submit.of(role or self.name, method, arguments, inputs or {}, num_rows, timeout_s=timeout_s)
        return self._client.submit(message, waits=waits)

    def _result(self, lease: Lease) -> Any:
        self._client.wait([lease.call_id], None)
        return self._client.result(lease.call_id)

    def _need_model(self, what: str) -> ModelSpec:
        if self.spec is None:
            raise OptionError(f"{self.name} is a function, not a model; it cannot {what}")
        return self.spec

    def _need(self, batch: Batch, names: Sequence[str], method: str) -> dict[str, ColumnRef]:
        """Return the references of the columns that a call reads.

        Raises:
            OptionError: it is not a batch.
            ColumnError: the batch lacks a column, or is another session's.
        """
        what = f"{self.name}.{method}"
        if not isinstance(batch, Batch):
            raise OptionError(f"{what} takes a batch, e.g. actor.generate(...) or session.batch(...); got {type(batch).__name__}")
        if refs_of(batch).client is not self._client:
            raise ColumnError(
                f"{what}: the batch belongs to another session, whose columns this one cannot read. Bring them over by value: "
                "session.batch(prompt=other['prompt'], response=other['response'])"
            )
        return batch.need(names, what)

    def _check_sequences(self, batch: Batch, what: str) -> None:
        """Refuse samples longer than the model's positions, where their lengths are known."""
        spec = self._need_model(what)
        prompt, response = batch.known_lengths("prompt"), batch.known_lengths("response")
        if prompt is None or response is None:
            return
        longest = int(np.argmax(prompt + response))
        if prompt[longest] + response[longest] > spec.max_positions:
            raise OptionError(
                f"{self.name}.{what}: sample {longest} has {prompt[longest]} prompt + {response[longest]} response tokens; "
                f"{spec} has {spec.max_positions} positions. Shorten it."
            )

    def _forward(self, batch: Batch, method: Method, arguments: Arguments = NO_ARGUMENTS, writes: Sequence[str] = ()) -> Batch:
        """Start one forward pass over prompt + response that writes columns, by default those that the method says."""
        inputs = self._need(batch, method.reads, method.name)
        inputs |= {name: refs_of(batch)[name] for name in method.reads_if_there if name in batch}
        self._check_sequences(batch, method.name)
        method = replace(method, writes=tuple(writes) or method.writes)
        return with_written(batch, self._submit(method, arguments, inputs, len(batch)), method.writes)


class TrainedHandle(ModelHandle):
    """A handle of a role that is trained, as actor and critic are: updates, gradients, checkpoints."""

    def __init__(self, host: Host, role: RoleSpec) -> None:
        super().__init__(host, role)
        self._rates_said: set[str] = set()
        """The kinds of what is learned of which the suggested learning rate was said."""
        self._said: set[str] = set()
        """Why files were left out of a folder that was written."""

    @checked
    def update(self, batch: Batch, loss: Loss, *, epochs: Epochs = 1, mini_batches: Count = 1, seed: int | None = None) -> Metrics:
        """Train on the batch: ``epochs`` passes, each reshuffled and cut into ``mini_batches`` optimizer steps.

        ``loss(out, b)`` sees whole sequences, flat over response tokens; it returns one number per token (or per sample), or
        that and a dict of metrics. The engine masks, and divides by the counts of the whole mini-batch, so that any layout
        and any micro-batch size gives the same gradient. (HybridFlow, table 4: update_actor, update_critic.)

        Args:
            batch: rows with prompt, response and what the loss reads.
            loss: e.g. ``ppo.PolicyLoss(clip=0.2)``, or a function of a cell; it travels by value.
            epochs: passes over the batch, at least 1.
            mini_batches: optimizer steps per pass, at most one per sample.
            seed: the seed of the shuffle; by default from the session's seed and the number of updates so far.

        Returns:
            Metrics with one row per mini-batch: loss, grad_norm, lr and the loss's own.

        Raises:
            ColumnError: the batch lacks a column.
            OptionError: an option is out of its range.
            NonFiniteLossError: at the first look: a loss or gradient was not finite; that optimizer step was refused.
        """
        self._check_learn(UPDATE, batch, loss)
        if mini_batches > len(batch):
            raise OptionError(f"mini_batches must be at most {len(batch)}, the batch's samples; got mini_batches={mini_batches}")
        if seed is None:
            seed = stable_seed(self._host.seed, self.name, self._host.counters.next(f"{self.name}.updates"))
        lease = self._learn(UPDATE, batch, loss, Learning(epochs=epochs, mini_batches=mini_batches, seed=seed))
        return Metrics(self._client, lease, self._role.dtype)

    @checked
    def forward_backward(self, batch: Batch, loss: Loss) -> OneRowMetrics:
        """Add the gradient of ``loss`` over the whole batch; nothing changes until :meth:`step`. Arguments as in :meth:`update`.

        Called several times before one step, gradients add up.
        """
        self._check_learn(FORWARD_BACKWARD, batch, loss)
        return OneRowMetrics(self._client, self._learn(FORWARD_BACKWARD, batch, loss))

    @checked
    def compute_loss(self, batch: Batch, loss: Loss) -> Value:
        """Return the loss over the whole batch without training (HybridFlow, table 4: compute_loss); ``.value`` waits.

        Arguments and errors as in :meth:`update`.
        """
        self._check_learn(COMPUTE_LOSS, batch, loss)
        return Value(self._client, self._learn(COMPUTE_LOSS, batch, loss))

    @property
    def grad_norm(self) -> float:
        """Norm of the gathered gradient over all shards, before clipping; waits."""
        return float(self._result(self._submit(GRAD_NORM, waits=True)))

    def step(self) -> OneRowMetrics:
        """Clip, take one optimizer step with the gathered gradient, and clear it. Returns grad_norm and lr."""
        return OneRowMetrics(self._client, self._submit(STEP))

    def _check_learn(self, method: Method, batch: Batch, loss: Loss) -> None:
        """Refuse what cannot be learned from.

        Raises:
            OptionError: the loss is none of this role's; the samples are too long, or no whole sets.
            ColumnError: the batch lacks a column, or one has another length than the responses.
        """
        what = f"{self.name}.{method.name}"
        check_loss(what, loss, self._role.head, len(batch))
        reads: Sequence[str] = getattr(loss, "reads", ())
        self._need(batch, [*method.reads, *reads], method.name)
        self._check_sequences(batch, method.name)
        refs_of(batch).check_aligned(reads, what)

    def _learn(self, method: Method, batch: Batch, loss: Loss, arguments: Learning = Learning()) -> Lease:  # noqa: B008
        if method is not COMPUTE_LOSS:
            self._tell_rate(loss)
        arguments = replace(arguments, function=Shipped.of(loss), together=getattr(loss, "together", 1))
        return self._submit(method, arguments, dict(refs_of(batch).by_name), len(batch))

    def _tell_rate(self, loss: Loss) -> None:
        """Say once which learning rate was suggested, where the optimizer has none of its own."""
        optimizer, spec = self._role.optimizer, self._role.model
        learns = what_is_learned(loss, self.kind)
        if optimizer is None or spec is None or optimizer.lr is not None or self._host.simulated or learns in self._rates_said:
            return
        self._rates_said.add(learns)
        size = spec.num_parameters()
        lora = self._role.lora
        suggested = optimizer.for_model(size, learns, adapters=lora is not None)
        self._host.notice(
            f"AdamW: learning rate {suggested.lr:.0e} (warm-up {suggested.warmup_steps} steps) suggested for "
            f"{self.name if lora is None else f'LoRA of {self.name}'}, "
            f"{millions(size)} parameters, and {WORDS[learns]}; optimizer=hf.AdamW(lr=...) to choose"
        )

    @checked
    def save_pretrained(self, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the weights as transformers reads them (config.json, safetensors, tokenizer); wait and return the folder.

        Files beside the weights are those of the folder it was loaded from, byte for byte where training changes nothing of them.
        Of a role with LoRA its adapters alone, as peft reads them (adapter_config.json, adapter_model.safetensors). A model that is
        there is replaced when all files of this one are complete, with a notice unless it is an earlier one of this process.

        Args:
            folder: the folder to write to.
            merge: add adapters to their weights, and write a plain model.

        Raises:
            OptionError: ``folder`` is no path, a file, or the folder the model was loaded from.
            CheckpointError: it cannot be made or written, e.g. for want of space; what was there is unchanged, and no new folder is
                left.
        """
        target = absolute(as_path(folder, "a model"), error=CheckpointError)
        if target.exists() and not target.is_dir():
            raise OptionError(f"{target} is a file; give the folder to write the model to")
        if self._role.folder and target == Path(self._role.folder).resolve():
            raise OptionError(f"{target} is the folder {self.name} was loaded from; give another one")
        merge = merge or self._role.lora is None
        written = "config.json" if merge else ADAPTER_CONFIG
        made = [folder_above for folder_above in (target, *target.parents) if not folder_above.exists()]
        try:
            (target if self._host.simulated else target.parent).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write to {target}: {error}") from error
        replaced = is_strangers(target / written)
        try:
            left_out = self._result(self._submit(SAVE_PRETRAINED, Folder(folder=str(target), merge=merge), waits=True))
        except BaseException:
            for empty in made:
                with suppress(OSError):  # it holds something by now
                    empty.rmdir()
            raise
        is_ours(target / written)
        if replaced:
            self._host.notice(f"{self.name}.save_pretrained replaced the model in {target}")
        for why in left_out or ():
            if why not in self._said:
                self._said.add(why)
                self._host.notice(f"{self.name}.save_pretrained left a file out: {why}")
        return target


def set_role(handle: ModelHandle, role: RoleSpec) -> None:
    """Let a handle take its role as it is placed, or a function's new version."""
    handle._role = role


def stable_seed(*parts: object) -> int:
    """Return a seed in [0, 2^31) that depends on the parts alone, not on Python's hash seed."""
    import hashlib

    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31


# -- the controller and the tokenizer as handles reach them, by Protocols; the rest of their session is ``handle.Host``


class TextCodec(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def encode_chat(self, chat: Chat | Sequence[Message]) -> list[int]:
        """Return the token ids of a chat, ready for the assistant's turn."""
        ...

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids."""
        ...


class CallClient(Client, Protocol):
    """The session's side of the controller, as handles use it."""

    @property
    def tokenizer_folder(self) -> str:
        """The model folder whose tokenizer turns text into tokens, or ``""``."""
        ...

    def send(self, message: Any) -> Any:
        """Send one message and return its reply."""
        ...

    def submit(self, message: Submit, *, waits: bool = False) -> Lease:
        """Start a call; ``waits``: the caller waits for it next."""
        ...

    def need_tokenizer(self) -> TextCodec:
        """Return the tokenizer."""
        ...


# -- whether a role can learn a loss: said at the call, before anything runs

GIVES = {"lm": "log_probs", "scalar": "values"}
"""Head of a role -> what its output has for a loss."""

NEEDS = {"policy": "log_probs", "values": "values"}
"""The kind of a loss -> the field of the output that it reads."""


def check_loss(what: str, loss: Any, head: str, num_rows: int) -> None:
    """Check that a loss is one, of this role, over so many rows.

    Args:
        what: the call, for messages.
        loss: a function of (out, b), or a loss of an algorithm.
        head: the role's head: ``"lm"`` or ``"scalar"``.
        num_rows: the number of rows of the batch.

    Raises:
        OptionError: it is a class, takes other arguments, reads what the role does not give, or the rows are no whole sets.
    """
    if isinstance(loss, type):
        raise OptionError(f"{what} takes a loss, a function of (out, b); got {shown(loss)}. Write e.g. ppo.PolicyLoss(clip=0.2).")
    if not _takes_both(loss):
        raise OptionError(
            f"{what} calls a loss with (out, b), the model's output and the batch's columns; {shown(loss)} does not take these two."
        )
    needs = NEEDS.get(getattr(loss, "learns", ""), GIVES[head])
    if needs != GIVES[head]:
        role = "an actor" if needs == "log_probs" else "a critic"
        raise OptionError(
            f"{what}: {type(loss).__name__} reads out.{needs}, and this role's output has {GIVES[head]}. It is a loss of {role}."
        )
    together = getattr(loss, "together", 1)
    if num_rows % together:
        raise OptionError(
            f"{what}: {type(loss).__name__} takes sets of {together} rows that stand one after the other; the batch has "
            f"{num_rows} rows. Pairs come from session.pairs(...)."
        )


def _takes_both(loss: Any) -> bool:
    """Whether a loss can be called with two arguments, as far as it says what it takes."""
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some that are written in C
        return True
    return True


# -- the user's own primitives: functions that run SPMD on a role's ranks, beside the built-in methods (HybridFlow, section 4.1)

RankFunction = Callable[..., Mapping[str, Any]]
"""``fn(model, rows, **options)`` -> the columns it writes, one entry per row it got."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Primitive(Method):
    """A function with what it reads and writes and how rows are spread. Made by :func:`primitive`; run by ``handle.call``.

    It is of the type of the built-in calls (``hfsdk.core.methods``), with the function that carries it out.
    """

    function: RankFunction

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()

    def __call__(self, model: Any, rows: Table, **options: Any) -> Mapping[str, Any]:
        """Run it here, on local rows, as in a test."""
        return self.function(model, rows, **options)

    def __repr__(self) -> str:
        return f"Primitive({self.name}: reads {', '.join(self.reads)}; writes {', '.join(self.writes)}; {self.protocol})"


@checked
def primitive(
    *, reads: Sequence[Name], writes: Sequence[Name], protocol: TransferProtocol = THREE_D
) -> Callable[[RankFunction], Primitive]:
    """Turn ``fn(model, rows)`` into a primitive that runs SPMD on every rank of a role.

    On each rank ``model`` is the worker's model and ``rows`` a :class:`hfsdk.core.table.Table` with the columns ``reads`` of the
    rows that the protocol gives this rank; the function returns a dict with the columns ``writes``, one entry per row. With the
    default protocol all tp and pp ranks of a dp rank get the same rows and must make the same collective calls.

    Example::

        @hf.primitive(reads=["prompt", "response"], writes=["margins"])
        def margins(model, rows): ...
        batch = actor.call(margins, batch)

    Raises:
        OptionError: an argument is not what it should be.
    """

    @checked
    def decorate(function: RankFunction) -> Primitive:
        name = getattr(function, "__name__", "primitive")
        own = replace(CALL, name=name, reads=tuple(reads), writes=tuple(writes), protocol=protocol)
        return Primitive(**{f.name: getattr(own, f.name) for f in fields(own)}, function=function)

    return decorate
