"""Hints for attributes that people type and that are not there: `AttributeHints` says what does the same here.

The names are those of TRL, transformers, verl, torch and pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeVar, overload

from hfsdk.core.text import nearest

_WEIGHTS = "the weights live in the workers: run(f) calls f(rank) on each, save_pretrained(folder) writes them"
_LOADS = "a role is declared with a model's folder, session.actor('folder'); session.load(folder) takes up a save"
_AFTER = "its columns come here when they are looked at: batch['response'], or batch.table('response', 'scores')"

SESSION = {
    "fit learn step run_training trainer training": "session.train(hf.PPO(), prompts, steps=50) trains",
    "generate": "a model generates: actor = session.actor('tiny'), then actor.generate(['the film'], max_new_tokens=16)",
    "update backward": "a model learns: actor.update(batch, hf.CrossEntropy())",
    "save_model save_pretrained push_to_hub": "actor.save_pretrained(folder) writes a model, session.save(folder) everything",
    "actor_model policy policy_model model": "session.actor(model) declares one; session.models has those declared",
    "critic_model value_model": "session.critic(model) declares one",
    "reference_model ref ref_model": "session.reference(actor) declares one",
    "reward_model reward_fn reward_func": "session.reward(model_or_function) declares one",
    "cost_model": "session.cost(model_or_function) declares one",
    "dataset data load_dataset dataloader": "session.prompts(data) reads prompts; hf.data has what is shipped",
    "eval validate test": "session.evaluate(held_out) measures",
    "log log_metrics logger wandb": "session.train(..., track='wandb') keeps every step's numbers",
    "metrics": "session.run.history has every step's numbers",
    "resume restore": "session.load(folder) takes up a save",
    "shutdown stop disconnect exit": "session.close() ends it; session.run.stop() ends a run",
    "timeline profile profiler": "session.trace has every call of a step, with its seconds",
    "devices gpus workers nodes": "session.cluster has the devices, session.placement who is on them",
    "sft": "SFT is a loss: actor.update(batch, hf.CrossEntropy()), with batches of session.demonstrations(data)",
}  # fmt: skip

HANDLE = {
    "save_model save save_checkpoint save_weights export": (
        "save_pretrained(folder) writes the model, session.save(folder) everything that training goes on from"
    ),
    "push_to_hub": "save_pretrained(folder) writes it as Hugging Face reads it; upload that folder",
    "load load_model load_checkpoint from_pretrained load_state_dict": _LOADS,
    "train fit learn": "session.train(hf.PPO(), prompts, steps=50) trains; update(batch, loss) is one update",
    "parameters named_parameters state_dict weights module model": _WEIGHTS,
    "backward": "forward_backward(batch, loss) adds gradients up, step() applies them; update(batch, loss) does both",
    "zero_grad optimizer lr scheduler": "its optimizer is declared with it: session.actor(model, optimizer=hf.AdamW(lr=1e-5))",
    "forward logits log_probs logprobs get_log_probs": "compute_log_probs(batch) of an actor or a reference",
    "generate chat": "an actor generates: session.actor(model)",
    "compute_values values get_values": "compute_values(batch) is a critic's: session.critic(model)",
    "compute_scores score scores rewards compute_reward compute_rewards get_rewards": (
        "compute_scores(batch) is a reward's: session.reward(model_or_function)"
    ),
    "compute_costs": "compute_costs(batch) is a cost model's: session.cost(model_or_function)",
    "to cuda cpu half bfloat16 device": "session.place({...}) says on which devices a role is; its declaration has its dtype",
    "config": "spec has the model's sizes, role what was declared",
    "tokenizer": "texts go in and come out: generate(['the film']), then batch.text()",
}  # fmt: skip

BATCH = {
    "keys names column column_names features": "batch.columns are the names of its columns, batch['response'] is one",
    "to cpu cuda numpy to_numpy to_dict to_list": _AFTER,
    "shape size": "len(batch) are the rows, batch.columns the columns",
    "mean sum min max std": "batch['scores'].mean(), of a column",
    "union": "batch.join(other, baseline_scores='scores') takes columns of another batch",
    "add_column assign": "batch.with_columns(score=[...]) has one more column",
    "repeat": "actor.generate(batch, n=4) makes four responses of each prompt; batch.take([0, 0, 1, 1]) repeats rows",
    "chunk split": "batch[:8] are rows of it",
    "shuffle sample": "batch.take([3, 1, 2]) are rows in that order",
    "select_columns select": "batch.table('prompt', 'response') brings some columns",
    "filter": "batch.take([i for i, score in enumerate(batch['scores']) if score > 0]) keeps rows",
    "decode texts completions responses": "batch.text() are the responses' texts, batch['response'] their tokens",
    "show head display": "batch.inspect(0) shows a row, batch.tokens() its tokens",
}  # fmt: skip

RAGGED = {
    "mean sum min max std var": "its rows differ in length: column.flat has all values in one array, column[0] the first row's",
    "shape ndim size": "len(column) is the number of rows, column.lengths has each row's",
    "numpy tolist to_list": "[row.tolist() for row in column] are lists, column.padded(0) is one array",
    "values data": "column.flat has all values in one array, column[0] the first row's",
}  # fmt: skip

RUN = {
    "to_pandas dataframe df metrics logs log_history table": "run.history is a DataFrame, one row for each step",
    "plot": "a run draws itself where it is a cell's last line; run.history.plot(y='score_mean') is your own picture",
    "cancel abort kill": "run.stop() ends it after its step",
    "join result": "run.wait() waits for a run in the background",
    "save": "session.save(folder) keeps everything; session.train(..., folder='runs/a', save_every=10) while it runs",
    "batch samples": "run.last.batch is the last step's; run.samples_of(3) shows those of a step",
    "trace timeline": "session.trace has every call of a step, with its seconds",
}  # fmt: skip


class AttributeHints:
    """Base of classes that name hfsdk's counterpart of an attribute they lack."""

    _elsewhere: ClassVar[Mapping[str, str]] = {}
    """Names elsewhere, divided by spaces -> a sentence that names hfsdk's counterpart."""

    if not TYPE_CHECKING:  # to mypy a missing attribute is one

        def __getattr__(self, name: str) -> Any:
            kind = type(self)
            if name.startswith("_"):
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
            if hasattr(kind, name):  # a property of it raised AttributeError: that is told
                return object.__getattribute__(self, name)
            said = self._instead(name) or nearest(name, [attribute for attribute in dir(self) if not attribute.startswith("_")])
            raise AttributeError(f"{kind.__name__} has no {name!r}; {said}")

    def _instead(self, name: str) -> str:
        """Return the sentence on hfsdk's counterpart of ``name``, or ``""``."""
        return next((said for names, said in self._elsewhere.items() if name in names.split()), "")


# -- completion: the names that Tab offers after an object's dot

S = TypeVar("S")
T = TypeVar("T")


class PublicNames:
    """Base of classes some of whose public names are for the rest of hfsdk alone."""

    _inner: ClassVar[tuple[str, ...]] = ()
    """The public names that completion leaves out."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in type(self)._inner]


class CompletableProperty(Generic[S, T]):
    """A read-only attribute of a class, like a property, that Tab may look into: it waits for nothing.

    A property may do anything, so IPython computes none for Tab, and ``session.models.`` would offer nothing.
    """

    def __init__(self, function: Callable[[S], T]) -> None:
        self.fget = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: S, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.fget(instance)

    def __set__(self, instance: S, value: object) -> NoReturn:
        raise AttributeError(f"{type(instance).__name__}.{self._name} is read only")
