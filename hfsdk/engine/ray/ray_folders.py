"""A model's folder, brought to the nodes of a pool that lack it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray

from hfsdk.core.call_flow import Call
from hfsdk.core.errors import PlacementError
from hfsdk.core.roles import RoleSpec
from hfsdk.engine.ray.ray_links import PoolState
from hfsdk.engine.ray.ray_pools import RayPools
from hfsdk.engine.ray.ray_store import WORKER_GONE, reason_of
from hfsdk.engine.weights.model_folders import Manifest, read_pieces


class FolderSender:
    """See the module's text."""

    def __init__(self, pools: RayPools) -> None:
        self._pools = pools
        self._sending = threading.Lock()

    def bring(self, role: RoleSpec, state: PoolState) -> None:
        """Have the model's folder on every node of the pool, as it is here; sent once to each node that lacks it."""
        far = [rank for rank, device in enumerate(state.pool.devices) if not self._pools.nodes[device].here]
        if not role.folder or not far:
            return
        with self._sending:  # one at a time, so that two pools on a node do not both send it
            manifest = Manifest.of(role.folder)
            found = self._ask(state, far, role, lambda w: w.find_folder.remote(manifest))
            lacking = {self._pools.nodes[state.pool.devices[rank]]: rank for rank, path in zip(far, found, strict=True) if not path}
            if not lacking:
                return
            takers = list(lacking.values())
            self._ask(state, takers, role, lambda w: w.receive.remote(manifest))
            for name, piece in read_pieces(manifest):
                self._ask(state, takers, role, partial(_write_piece, name, ray.put(piece)))
            self._ask(state, takers, role, lambda w: w.finish_folder.remote())
            self._ask(state, far, role, lambda w: w.find_folder.remote(manifest))

    def _ask(self, state: PoolState, ranks: Sequence[int], role: RoleSpec, ask: Callable[[Any], Any]) -> list[Any]:
        """Ask some ranks something about a role's folder and return their answers."""
        refs = [ask(state.workers[rank]) for rank in ranks]
        answers = []
        for rank, ref in zip(ranks, refs, strict=True):
            try:
                answers.append(ray.get(ref))
            except ray.exceptions.RayTaskError as error:
                node = self._pools.nodes[state.pool.devices[rank]]
                raise PlacementError(f"{role.folder} cannot be brought to {node}: {error.cause}") from None
            except WORKER_GONE as error:
                raise self._pools.died(state, Call(id=-1, role=role.name, method="load"), rank, reason_of(error)) from None
        return answers


def _write_piece(name: str, piece: Any, worker: Any) -> Any:
    return worker.write_piece.remote(name, piece)
