"""``Batch``: an immutable table of samples whose columns live in the cluster.

The controller holds references; a column's values come here only when someone looks (``batch["values"]``, ``to_pandas``,
``text``). Every call returns a new batch with more columns; the old one stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np

from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.checks import Index, Name, checked, is_whole, shown
from hfsdk.core.columns import COLUMNS, NEW_LOG_PROBS, PER_TOKEN, column_lines, hint_for
from hfsdk.core.errors import ColumnError, OptionError, SimulatedValueError
from hfsdk.core.functions import Shipped
from hfsdk.core.hints import BATCH, AttributeHints, PublicNames
from hfsdk.core.pending import Client, ColumnRef, Lease, Pending, Value
from hfsdk.core.table import Array, Column, Ragged, RowNumbers, Table, as_column, row_numbers
from hfsdk.core.text import printable
from hfsdk.core.tokens import Tokens, choose_rows
from hfsdk.core.unscored import NOT_SCORED, SCORES

if TYPE_CHECKING:
    import pandas as pd


MOST_ROWS = 10_000_000
"""Of a column that a user gives: what is more is a typo, and takes gigabytes."""


class Batch(AttributeHints, PublicNames, Pending):
    """Samples by reference: a table to which every call adds columns. Made by ``session.prompts(...)`` and ``session.batch(...)``.

    ``batch["scores"]`` waits for a column and brings it here; ``batch[:8]`` is a batch of the first rows; ``batch.text()``,
    ``batch.to_pandas()``, ``batch.inspect(0)`` and ``batch.tokens()`` show what is in it. ``batch.columns`` are the names of those
    it has; other columns than these are the data's or your own.
    """

    _inner = ("call_ids", "column_states", "from_columns", "known_lengths", "need", "view")
    _elsewhere = BATCH

    def __init__(self, client: Client, columns: Mapping[str, ColumnRef], num_rows: int) -> None:
        super().__init__(client, [ref.lease for ref in columns.values() if ref.lease is not None])
        self._refs = ColumnRefs(client, columns)
        self.num_rows = num_rows

    @classmethod
    def from_columns(cls, client: Client, columns: Mapping[str, Any]) -> Batch:
        """Store local data as a batch: lists of sequences become ragged columns, numbers scalar ones, text object ones.

        Raises:
            ColumnError: the columns differ in length or are empty.
        """
        table = Table({name: _given(name, value) for name, value in columns.items()})
        if not table.num_rows:
            raise ColumnError("a batch needs at least one sample; the columns given are empty")
        lease = client.put(table)
        return cls(client, {name: ColumnRef(lease.call_id, name, lease=lease) for name in table}, table.num_rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._refs.by_name)

    def _instead(self, name: str) -> str:
        column = self._refs.meant(name) if name not in self._refs.by_name else name
        said = super()._instead(name)
        if said or not column:
            return said
        missing = "" if column in self._refs.by_name else f". {hint_for(column)}"
        return f"a column is batch[{column!r}]{missing}"

    def __len__(self) -> int:
        return self.num_rows

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._refs.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs.by_name)

    @overload
    def __getitem__(self, key: str) -> Ragged | Array | list[Any]: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | Array) -> Batch: ...
    def __getitem__(self, key: Any) -> Any:
        """``batch["values"]`` waits for and brings a column; ``batch[:8]`` or ``batch[[3, 1]]`` is a batch of those rows."""
        if isinstance(key, str):
            return self._client.fetch({key: self._refs[key]})[key]
        if isinstance(key, (tuple, list)) and any(isinstance(one, str) for one in key):
            names = ", ".join(repr(one) for one in key if isinstance(one, str))
            raise ColumnError(f"batch['response'] is one column; batch.table({names}) brings several")
        if is_whole(key):
            at = shown(key)
            raise ColumnError(f"batch[{at}] is ambiguous; use batch[{at}:{at} + 1] for rows or batch.inspect({at}) to look")
        if isinstance(key, slice):
            try:
                key = range(*key.indices(self.num_rows))
            except (TypeError, ValueError) as error:
                raise ColumnError(f"batch[key] takes a slice of whole numbers; got {shown(key)}") from error
        return self.take(key)

    @checked(error=ColumnError)
    def take(self, rows: RowNumbers) -> Batch:
        """Return a batch of these rows, in this order; rows may repeat. Nothing is copied.

        Raises:
            ColumnError: a row number is out of range, or none is given.
        """
        index = row_numbers(rows, self.num_rows, "the batch")
        if not len(index):
            raise ColumnError("no rows selected; a batch needs at least one sample")
        return Batch(self._client, {n: r.take(index) for n, r in self._refs.by_name.items()}, len(index))

    @checked
    def with_columns(self, **columns: Any) -> Batch:
        """Return the batch with own data as more (or other) columns, one entry per sample.

        Raises:
            ColumnError: a column has another number of entries than the batch has samples.
        """
        given = {name: _given(name, value) for name, value in columns.items()}
        for name, column in given.items():
            if len(column) != self.num_rows:
                raise ColumnError(
                    f"column {shown(name)} has {len(column)} entries; the batch has {self.num_rows} samples. Give one per sample."
                )
        return with_written(self, self._client.put(Table(given)), list(given))

    @checked
    def alias(self, name: Name, source: str) -> Batch:
        """Return the batch with column ``source`` also under ``name``; nothing is copied."""
        return Batch(self._client, {**self._refs.by_name, name: self._refs[source]}, self.num_rows)

    @checked
    def join(self, other: Batch, /, **columns: str) -> Batch:
        """Return the batch with columns of another batch of as many samples, row by row; nothing is copied.

        Args:
            other: e.g. other responses to the same prompts.
            columns: name here = name there, e.g. ``baseline_scores="scores"``.

        Raises:
            ColumnError: the other batch has another number of samples, has no such column, or is of another session.
        """
        if other.num_rows != self.num_rows:
            raise ColumnError(
                f"the other batch has {other.num_rows} samples, this one {self.num_rows}; join needs one row for each row, in the "
                "same order: other.take([...]) repeats or picks rows"
            )
        if other._client is not self._client:
            raise ColumnError("the other batch is of another session; bring its columns here: with_columns(name=other['name'])")
        return Batch(
            self._client, {**self._refs.by_name, **{new: other._refs[name] for new, name in columns.items()}}, self.num_rows
        )

    def adopt(self) -> Batch:
        """Return the batch by value, as data of your own; waits, and brings the columns here and back.

        So a batch of another branch (``StaleBatchError``) can be trained on, knowingly off-policy.
        """
        return Batch.from_columns(self._client, self.table())

    @checked
    def drop(self, *names: str) -> Batch:
        """Return the batch without the columns ``names``."""
        for name in names:
            _ = self._refs[name]  # raises where there is none
        return Batch(self._client, {n: r for n, r in self._refs.by_name.items() if n not in names}, self.num_rows)

    def need(self, names: Sequence[str], what: str) -> dict[str, ColumnRef]:
        """Return the references of columns that ``what`` reads.

        Raises:
            ColumnError: one is missing; the message says which calls write it.
            OptionError: ``names`` is one text.
        """
        return self._refs.need(names, what)

    def known_lengths(self, name: str) -> Array | None:
        """Return the lengths of the variable-length column ``name``, or ``None`` while they are not known. Does not wait."""
        return self._refs.lengths(name)

    @checked
    def map(self, fn: Callable[[Table], Mapping[str, Any]], reads: Sequence[str], writes: Sequence[Name]) -> Batch:
        """Run ``fn(table)`` over whole columns in a CPU task and add the columns it returns.

        ``fn`` gets a :class:`hfsdk.core.table.Table` with the columns ``reads`` (numpy and ``Ragged``) and returns a dict with
        exactly the columns ``writes``, one entry per sample. Statistics it takes are over the whole batch.

        Raises:
            ColumnError: a column is missing, or one per token does not fit the responses.
        """
        inputs = self._refs.need(reads, f"map({_name(fn)})")
        self._refs.check_aligned([name for name in reads if name in PER_TOKEN], f"map({_name(fn)})")
        lease = self._client.task("map", Shipped.of(fn), inputs, tuple(writes), self.num_rows)
        return with_written(self, lease, writes)

    @checked
    def reduce(self, fn: Callable[[Table], Any], reads: Sequence[str]) -> Value:
        """Run ``fn(table)`` over the columns ``reads`` in a CPU task and return its (small) result as a pending value."""
        inputs = self._refs.need(reads, f"reduce({_name(fn)})")
        self._refs.check_aligned([name for name in reads if name in PER_TOKEN], f"reduce({_name(fn)})")
        return Value(self._client, self._client.task("reduce", Shipped.of(fn), inputs, (), self.num_rows))

    @checked
    def table(self, *names: str) -> Table:
        """Bring columns here (all of them without names); waits."""
        return self._client.fetch({n: self._refs[n] for n in (names or self.columns)})

    @checked
    def text(self, column: str = "response") -> list[str]:
        """Return a token column (or a text column) as one string per sample; waits."""
        values = self[column]
        if isinstance(values, Ragged):
            return self._client.texts([row.tolist() for row in values])
        return [str(v) for v in values]

    @checked
    def to_pandas(self, what: str = "samples") -> pd.DataFrame:
        """Return a DataFrame; ``what`` is ``"samples"``, one row per sample, or ``"tokens"``, one per response token; waits.

        In ``"samples"`` token columns are decoded and per-token numbers are given as their mean.
        """
        import pandas as pd

        table = self.table()
        if what == "tokens":
            return self._token_frame(table)
        if what != "samples":
            raise ColumnError(f"to_pandas({shown(what)}): there are 'samples' and 'tokens'")
        data: dict[str, Any] = {}
        for name, column in table.items():
            if isinstance(column, Ragged) and name in SEQUENCES:
                data[name] = self._client.texts([row.tolist() for row in column])
                data[f"{name}_tokens"] = column.lengths
            elif isinstance(column, Ragged):
                data[name] = [float(row.mean()) if len(row) else float("nan") for row in column]
            else:
                data[name] = column
        return pd.DataFrame(data)

    def _token_frame(self, table: Table) -> pd.DataFrame:
        import pandas as pd

        if "response" not in table:
            raise ColumnError("to_pandas('tokens') needs a column 'response'; call actor.generate(batch) first")
        response = table.ragged("response")
        lengths = response.lengths
        data: dict[str, Any] = {
            "sample": np.repeat(np.arange(self.num_rows), lengths),
            "position": np.concatenate([np.arange(n) for n in lengths]) if self.num_rows else [],
            "token_id": response.flat,
            "token": self._client.token_texts(response.flat.tolist()),
        }
        for name, column in table.items():
            if isinstance(column, Ragged) and name not in SEQUENCES and np.array_equal(column.lengths, lengths):
                data[name] = column.flat
        return pd.DataFrame(data)

    @checked
    def inspect(self, row: int) -> pd.DataFrame:
        """Return one sample token by token: a row per response token with every per-token column; waits."""
        if not 0 <= row < self.num_rows:
            raise ColumnError(f"sample {row!r} does not exist; the batch has {self.num_rows} samples (0 to {self.num_rows - 1})")
        return self.take([row]).to_pandas("tokens").drop(columns="sample")

    @checked
    def tokens(
        self,
        rows: slice | RowNumbers | None = None,
        *,
        new: str | Batch | None = None,
        old: str = "old_log_probs",
        clip: float = 0.2,
        clip_high: float | None = None,
        color: str | None = None,
    ) -> Tokens:
        """Look at samples token by token: text, every per-token column, and with ``new`` the ratio and what is clipped.

        The result draws itself in a notebook. Waits for the columns, and brings only the rows that are shown.

        Args:
            rows: which samples, e.g. ``range(8)``, ``[3, 1]``, ``slice(64, 128)`` or a mask; the first 64 when not given
                (fewer where responses are long).
            new: log-probabilities under the policy as it is now, for PPO's ratio ``exp(new - old)``: the name of a column,
                or a batch whose ``old_log_probs`` are meant, e.g. ``actor.compute_log_probs(batch)`` after an update.
            old: column of the ratio's denominator.
            clip: epsilon of the ratio: tokens that it leaves without gradient are marked.
            clip_high: upper epsilon, where it differs.
            color: what colours the tokens at first, e.g. ``"advantages"``, ``"kl"``, ``"ratio"`` or a column of your own.

        Raises:
            ColumnError: there are no responses yet, a column is missing, or ``new`` has other rows or lengths.
            OptionError: a clip is out of its range, or the samples asked for are too many to draw.
        """
        what = "batch.tokens()"
        self.need(["response", *([old] if new is not None else []), *([new] if isinstance(new, str) else [])], what)
        lengths = self.known_lengths("response")
        if lengths is None:
            self._client.wait([self._refs["response"].call_id], None)
            lengths = self.known_lengths("response")
        if lengths is None:
            lengths = self.table("response").ragged("response").lengths
        index = choose_rows(rows, lengths)
        few = self.take(index)
        table = few.table()
        if isinstance(new, Batch):
            if new.num_rows != self.num_rows:
                raise ColumnError(f"{what}: new has {new.num_rows} samples, the batch {self.num_rows}; compute it from this batch")
            newer = new.take(index).need(["old_log_probs"], f"{what} with new=")
            table = table.with_columns({NEW_LOG_PROBS: self._client.fetch(newer)["old_log_probs"]})
        first_rows = (np.cumsum(lengths) - lengths)[index]
        name = new if isinstance(new, str) or new is None else NEW_LOG_PROBS
        return Tokens.of(
            table, index, self.num_rows, first_rows, self._client.token_bytes,
            new=name, old=old, clip=clip, clip_high=clip_high, color=color,
        )  # fmt: skip

    def column_states(self) -> list[ColumnState]:
        """Return what is known of every column without waiting: name, kind, dtype, state, bytes, mean length, writer."""
        return self._refs.states()

    @checked
    def view(self, num_samples: Index = 3) -> dict[str, Any]:
        """Return plain data for display: column states and ``num_samples`` samples of what is ready. Does not wait."""
        return {"num_rows": self.num_rows, "columns": self.column_states(), "samples": self._sample_view(num_samples)}

    def _sample_view(self, num_samples: int) -> list[dict[str, Any]]:
        ready = [n for n in (*SEQUENCES, "scores") if n in self]
        few = self.take(np.arange(min(num_samples, self.num_rows)))
        ready = [n for n in ready if self._client.state(self._refs[n].call_id) == "done" and not self._client.gone(few._refs[n])]
        if not set(ready) & set(SEQUENCES):
            return []
        try:
            table = few._client.fetch({n: few._refs[n] for n in ready})
        except SimulatedValueError:
            return []
        texts = {n: self._client.texts([row.tolist() for row in table.ragged(n)]) for n in set(SEQUENCES) & set(ready)}
        samples = []
        for i in range(few.num_rows):
            entry: dict[str, Any] = {"prompt": None, "response": None, "score": None}
            entry |= {name: column[i] for name, column in texts.items()}
            if "scores" in ready:
                entry["score"] = float(np.asarray(table["scores"])[i])
            samples.append(entry)
        return samples

    def __repr__(self) -> str:
        words = [c["name"] + ("" if c["state"] == "ready" else f" ({c['state']})") for c in self.column_states()]
        return printable(f"Batch({self.num_rows} samples: {', '.join(words)})")


Batch.__doc__ = f"{Batch.__doc__}\n\n    Columns:{column_lines()}\n    "


def refs_of(batch: Batch) -> ColumnRefs:
    """Return a batch's columns by reference, for what calls with them."""
    return batch._refs


def with_written(batch: Batch, lease: Lease, names: Sequence[str], num_rows: int | None = None) -> Batch:
    """Return the batch with the columns ``names`` that the call ``lease`` writes."""
    refs = refs_of(batch)
    new = {name: ColumnRef(lease.call_id, name, lease=lease) for name in names}
    return Batch(refs.client, {**refs.by_name, **new}, batch.num_rows if num_rows is None else num_rows)


def _given(name: str, value: Any) -> Column:
    """Turn what a user gives into a column; token ids are whole numbers, a score may be ``None``."""
    if name in SCORES and isinstance(value, (list, tuple)) and any(one is None for one in value):
        value = [NOT_SCORED if one is None else one for one in value]
    try:
        if isinstance(value, Iterator) or len(value) > MOST_ROWS:
            raise TypeError("endless, or too long")
        column = as_column(value)
    except Exception as error:  # the user's own object raises what it likes
        raise ColumnError(
            f"column {shown(name)} must be a list of numbers, of texts or of lists of numbers, one entry per sample; got "
            f"{shown(value)}"
        ) from error
    if name in SEQUENCES and isinstance(column, Ragged) and len(column.flat) and column.dtype.kind not in "iu":
        held = f"{column.dtype} ({column.flat[0]!r}, ...)"
        raise ColumnError(f"column {shown(name)} holds token ids, which are whole numbers; got {held}")
    return column


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


# ``ColumnRefs``: which call wrote each column of a batch, and what is known of it without looking at values.


class ColumnState(TypedDict):
    """What is known of a column without looking at its values; only name, state and writer before it is written."""

    name: str
    kind: str
    """As :class:`~hfsdk.core.pending.ColumnInfo` has it, or ``""``."""
    dtype: str
    state: str
    """``"ready"``; ``"lost"``: its values went with a closed session; or the state of the call that writes it."""
    bytes: int | None
    mean_length: float | None
    """Of ragged columns."""
    writer: str
    """Role and method."""


OTHERS = {
    "prompt": "prompts query queries question",
    "response": "responses completion completions output outputs response_ids completion_ids",
    "scores": "score reward rewards token_level_scores",
    "costs": "cost",
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
    "old_log_probs": "log_probs logprobs old_logprobs",
    "ref_log_probs": "ref_logprobs ref_log_prob",
    "rollout_log_probs": "log_probs logprobs sampling_logprobs",
}  # fmt: skip
"""hfsdk's column -> what it is called elsewhere, or in the singular."""


class ColumnRefs:
    """The columns of a batch by reference. Nothing here waits.

    Attributes:
        client: whom they are asked of.
        by_name: a reference for every column.
    """

    def __init__(self, client: Client, by_name: Mapping[str, ColumnRef]) -> None:
        self.client = client
        self.by_name = dict(by_name)

    def __getitem__(self, name: str) -> ColumnRef:
        """Return a column's reference.

        Raises:
            ColumnError: there is no such column.
        """
        if name not in self.by_name:
            ours = self.meant(name)
            said = "" if not ours else hint_for(ours) if ours not in self.by_name else f"hfsdk calls it {ours}."
            raise ColumnError(f"the batch has no column {shown(name)}; it has {', '.join(self.by_name)}. {said}".rstrip(". ") + ".")
        return self.by_name[name]

    def meant(self, name: str) -> str:
        """Return hfsdk's column of a name that people give it, of those that are there if it may be several; ``""`` for none."""
        found = [here for here, names in OTHERS.items() if name in names.split()] + [name] * (name in COLUMNS)
        return next((here for here in found if here in self.by_name), found[0] if found else "")

    def need(self, names: Sequence[str], what: str) -> dict[str, ColumnRef]:
        """Return the references of columns that ``what`` reads.

        Raises:
            ColumnError: one is missing; the message says which calls write it.
            OptionError: ``names`` is one text.
        """
        if isinstance(names, str):
            raise OptionError(f"{what} reads a list of columns, e.g. ['prompt']; got the text {shown(names)}")
        missing = [n for n in names if n not in self.by_name]
        if missing:
            hints = [f"{shown(n)} ({COLUMNS[n].meaning})" if n in COLUMNS else shown(n) for n in missing[:10]]
            raise ColumnError(
                f"{what} reads {', '.join(hints)}, which the batch does not have; it has {', '.join(self.by_name)}. "
                + " ".join(dict.fromkeys(map(hint_for, ["response"] if "response" in missing else missing[:4])))
            )
        return {name: self.by_name[name] for name in names}

    def lengths(self, name: str) -> Array | None:
        """Return the lengths of a variable-length column, or ``None`` while they are not known."""
        ref = self.by_name.get(name)
        info = None if ref is None else self.client.info(ref)
        if ref is None or info is None or info.lengths is None:
            return None
        return info.lengths if ref.rows is None else info.lengths[ref.rows]

    def check_aligned(self, names: Sequence[str], what: str) -> None:
        """Refuse columns per token that are not as long as the responses, where both lengths are known.

        Raises:
            ColumnError: names the column, the first sample that differs, and both lengths.
        """
        response = self.lengths("response")
        for name in names:
            lengths = self.lengths(name)
            if response is None or lengths is None or np.array_equal(lengths, response):
                continue
            row = int(np.flatnonzero(lengths != response)[0])
            raise ColumnError(
                f"{what}: column {name!r} has {lengths[row]} values for sample {row}, whose response has {response[row]} tokens; "
                "give one value per response token"
            )

    def states(self) -> list[ColumnState]:
        """Return name, kind, dtype, state, bytes, mean length and writer of every column."""
        states: list[ColumnState] = []
        for name, ref in self.by_name.items():
            state = self.client.state(ref.call_id)
            info = self.client.info(ref) if state == "done" else None
            lengths = None if info is None or info.lengths is None else info.lengths
            if lengths is not None and ref.rows is not None:
                lengths = lengths[ref.rows]
            states.append({
                "name": name, "kind": info.kind if info else "", "dtype": info.dtype if info else "",
                "state": state if state != "done" else "lost" if self.client.gone(ref) else "ready",
                "bytes": info.num_bytes if info else None,
                "mean_length": float(lengths.mean()) if lengths is not None and len(lengths) else None,
                "writer": self.client.writer(ref.call_id),
            })  # fmt: skip
        return states
