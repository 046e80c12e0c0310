"""The one owner of a replica's parameters: forward, loss, backward, inner and outer step, snapshot, recovery.

Called from the compute thread only, so nothing is locked. Invariant: every change of the weights passes `_changed`,
which forgets the autograd graphs kept so far; a backward whose graph is gone recomputes from the boundary input with
the weights of the moment.

Gradients: the objective of a microbatch is the sum over its rows of their mean token loss. So gradients add up, and
the inner step divides by rows: those of loss passes for head and final norm, of backward passes for all else.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peer.compute import snapshot
from peer.compute.flat import FlatStage
from peer.compute.inner_optimizer import InnerOptimizer
from peer.compute.slow_weights import Outcome, SlowWeights
from peer.model.stage import FirstStage, build_stage, renumbered
from protocols.actions import DonorState, RecoverySource, RunRecovery
from protocols.checkfree import mix
from protocols.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from protocols.messages import TensorPacket, WeightsKind, WorkKey
from protocols.run_spec import RunSpec
from protocols.tensor_codec import decode, encode

BOUNDARY_MAX = (
    1e6  # healthy activations stay below 1e4; the squares of larger ones may overflow, then all is NaN
)
GRAPHS_BYTES_MAX = 1 << 30  # of activations kept for backward; beyond it, backward recomputes


@dataclass(frozen=True, slots=True)
class _Graph:
    """One forward with its graph. `leaf` is the boundary input; None on the first stage."""

    leaf: Tensor | None
    out_BLD: Tensor


@dataclass(slots=True)
class _Stash:
    source: TensorPacket | Tensor  # the boundary input, or the tokens [B, L] on the first stage
    targets_BL: Tensor | None = None
    graph: _Graph | None = None


class StageRuntime:
    """A replica of `stage` with its optimizer."""

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        *,
        device: torch.device | str = "cpu",
        graphs_bytes_max: int = GRAPHS_BYTES_MAX,
    ) -> None:
        self.spec = spec
        self.stage = stage
        self.device = torch.device(device)
        self.round = 0
        self.outer_step = 0
        self.tokens_trained = 0  # in backward passes
        self.num_recomputed = 0  # backward passes without a kept graph
        self._module = build_stage(spec, stage).to(self.device)
        self.flat = FlatStage(self._module)
        self._optimizer = InnerOptimizer(spec, self.flat)
        self._slow = SlowWeights(spec.outer, self.flat.weights)
        self._stashes: dict[Hashable, _Stash] = {}
        self._graphs_max = graphs_bytes_max // max(1, self._graph_bytes())
        self._num_graphs = 0

    @property
    def schema(self) -> str:
        return self.flat.schema

    @property
    def num_stashes(self) -> int:
        return len(self._stashes)

    @property
    def num_nonfinite_steps(self) -> int:
        return self._optimizer.num_nonfinite

    def weights(self) -> dict[str, Tensor]:
        """Views under the exported names."""
        return self.flat.by_name(self.flat.weights)

    def mean_gradients(self) -> dict[str, Tensor]:
        """What the next inner step will see, before clipping."""
        return self.flat.by_name(self._optimizer.mean_gradient())

    # ---- microbatches ----

    def put_batch(self, key: WorkKey, tokens_BL: Tensor, targets_BL: Tensor) -> None:
        """First stage: hold a microbatch for all its attempts, until its backward or `drop`."""
        self._stashes[self._stash_key(key)] = _Stash(source=tokens_BL, targets_BL=targets_BL)

    def forward(self, key: WorkKey, packet: TensorPacket | None, *, train: bool) -> TensorPacket:
        """On the first stage `packet` is None: the tokens are here. Not `train`: nothing is kept."""
        stash = self._stash(key) if packet is None else _Stash(source=packet)
        keep_graph = train and self._num_graphs < self._graphs_max
        graph = self._run(stash.source, with_graph=keep_graph)
        out = encode(graph.out_BLD, self.spec.boundary_codec)
        if train:
            self._keep(key, stash, graph if keep_graph else None)
        return out

    def loss(self, key: WorkKey, packet: TensorPacket, *, train: bool) -> tuple[float, TensorPacket | None]:
        """Mean loss in nats a token, and the boundary gradient when training."""
        assert isinstance(self._module, FirstStage), "the loss is the first stage's"
        targets_BL = self._stash(key).targets_BL
        assert targets_BL is not None, "a microbatch has targets"
        x_BLD = self._input(packet).requires_grad_(train)
        with torch.set_grad_enabled(train), self._precision():
            loss = self._module.loss(x_BLD, targets_BL.to(self.device))
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"{key} loss is {value}")
        if not train:
            return value, None  # the targets stay for another attempt, until `drop`
        rows = len(x_BLD)
        (loss * rows).backward()
        self._optimizer.rows[True] += rows
        assert x_BLD.grad is not None, "backward reached its leaf"
        return value, encode(x_BLD.grad, self.spec.boundary_codec)

    def backward(self, key: WorkKey, packet: TensorPacket) -> TensorPacket | None:
        """Add to the gradient and forget the stash; the boundary gradient for the hop before, if there is one."""
        stash = self._stash(key)
        gradient_BLD = self._input(packet)
        if stash.graph is None:
            self.num_recomputed += 1
        graph = stash.graph or self._run(stash.source, with_graph=True)
        self._drop_graph(stash)  # it serves once
        torch.autograd.backward(graph.out_BLD, gradient_BLD)
        self.drop(key)
        self._optimizer.rows[False] += len(gradient_BLD)
        self.tokens_trained += gradient_BLD.shape[:2].numel()
        if graph.leaf is None:
            return None
        assert graph.leaf.grad is not None, "backward reached its leaf"
        return encode(graph.leaf.grad, self.spec.boundary_codec)

    def drop(self, key: WorkKey) -> None:
        stash = self._stashes.pop(self._stash_key(key), None)
        if stash is not None:
            self._drop_graph(stash)

    def _run(self, source: TensorPacket | Tensor, *, with_graph: bool) -> _Graph:
        with torch.set_grad_enabled(with_graph), self._precision():
            if isinstance(self._module, FirstStage):
                assert isinstance(source, Tensor), "the first stage starts from tokens"
                return _Graph(None, self._module.embed(source.to(self.device)))
            assert isinstance(source, TensorPacket), "a middle stage starts from a packet"
            leaf_BLD = self._input(source).requires_grad_(with_graph)
            return _Graph(leaf_BLD, self._module(leaf_BLD))

    def _input(self, packet: TensorPacket) -> Tensor:
        tensor = decode(packet)
        low, high = tensor.aminmax()
        if not -BOUNDARY_MAX <= float(low) <= float(high) <= BOUNDARY_MAX:
            raise RemoteProtocolError("too-large", f"elements from {float(low):.3g} to {float(high):.3g}")
        return tensor.to(self.device, torch.float32)

    def _precision(self) -> AbstractContextManager[Any]:
        """Parameters, residual stream and gradients stay fp32; bfloat16 is for the products alone."""
        if self.spec.optimizer.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _stash_key(self, key: WorkKey) -> Hashable:
        return key.microbatch if self.stage == 0 else key

    def _stash(self, key: WorkKey) -> _Stash:
        stash = self._stashes.get(self._stash_key(key))
        if stash is None:
            raise LocalProtocolError(f"{key} has no stash on stage {self.stage}")
        return stash

    def _keep(self, key: WorkKey, stash: _Stash, graph: _Graph | None) -> None:
        previous = self._stashes.get(self._stash_key(key))
        if previous is not None:
            self._drop_graph(previous)
        stash.graph = graph
        self._num_graphs += graph is not None
        self._stashes[self._stash_key(key)] = stash

    def _drop_graph(self, stash: _Stash) -> None:
        if stash.graph is not None:
            stash.graph = None
            self._num_graphs -= 1

    def _graph_bytes(self) -> int:
        """About what autograd keeps of one microbatch: 12 rows of width D and 4 of F, fp32, a token and layer."""
        model, num_layers = self.spec.model, len(self.spec.layer_range(self.stage))
        a_token = 4 * (12 * model.hidden_size + 4 * model.intermediate_size)
        return self.spec.tokens_per_microbatch * num_layers * a_token

    # ---- steps ----

    def inner_step(self, round_: int) -> float:
        """Close round `round_`: the weights have then seen one more.

        Gradient norm before clipping; 0.0: no gradient, or none that is finite, and nothing was changed.
        """
        self.round = round_ + 1
        norm = self._optimizer.step(self.round)
        self._changed()
        return norm

    def prepare_outer(
        self, outer_step: int, pair_round: int, *, weight: float = 1.0
    ) -> tuple[TensorPacket, str]:
        """Our half for the partner, and the schema that he must share."""
        packet = self._slow.prepare(outer_step, pair_round, self.flat.weights, weight=weight)
        return packet, self.schema

    def apply_outer(self, outer_step: int, pair_round: int, packet: TensorPacket | None) -> Outcome:
        """An unfit half is not applied: we step alone."""
        outcome = self._slow.apply(outer_step, pair_round, self.flat.weights, packet)
        self.outer_step = outer_step
        self._changed()
        return outcome

    def _changed(self) -> None:
        for stash in self._stashes.values():
            self._drop_graph(stash)

    # ---- state, out and in ----

    def _state(self, kind: WeightsKind) -> dict[str, Tensor]:
        """Views, except for the ramp and the limit."""
        if kind is not WeightsKind.FULL:
            return self.weights()
        return self.weights() | {
            snapshot.SLOW_WEIGHTS: self._slow.weights,
            snapshot.OUTER_MOMENTUM: self._slow.momentum,
            snapshot.PULL_LIMIT: self._slow.limit.state(),
            snapshot.MOMENT: self._optimizer.moment,
            snapshot.SQUARE: self._optimizer.square,
            snapshot.STEPS: self._optimizer.steps,
            snapshot.RAMP: torch.tensor([float(self._optimizer.ramp_steps_left)]),
        }

    def _set_state(self, state: Mapping[str, Tensor]) -> None:
        own = self._state(WeightsKind.FULL)
        for name, tensor in state.items():
            own[name].copy_(tensor)
        self._optimizer.ramp_steps_left = int(own[snapshot.RAMP])
        self._slow.limit.set_state(own[snapshot.PULL_LIMIT])
        self._optimizer.forget_gradient()
        self._slow.forget_prepared()
        self._changed()

    def _expected(self, kind: WeightsKind) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._state(kind).items()}

    def snapshot(self, kind: WeightsKind) -> tuple[tuple[TensorPacket, ...], str]:
        """Slices of a safetensors file, and its sha256."""
        about = {"format": "pt", "stage": str(self.stage), "round": str(self.round), "schema": self.schema}
        return snapshot.pack(self._state(kind), about)

    def recover(self, action: RunRecovery) -> bool:
        """All or nothing. False: wrong stage, or a donor's state is not what it should be."""
        if action.stage != self.stage:
            return False
        match action.source:
            case RecoverySource.INITIAL:
                return True
            case RecoverySource.CATCH_UP:
                done = self._catch_up(action.donors)
            case RecoverySource.SHADOW:
                done = self._restore(action.donors)
            case RecoverySource.MERGE | RecoverySource.COPY:
                done = self._rebuild(action.donors)
        if done:
            self.round, self.outer_step = action.round, action.outer_step
        return done

    def _catch_up(self, donors: tuple[DonorState, ...]) -> bool:
        """Everything of one sibling: slow weights and momentum belong together."""
        state = self._own_state(donors, WeightsKind.FULL)
        if state is None:
            return False
        self._set_state(state)
        return True

    def _restore(self, donors: tuple[DonorState, ...]) -> bool:
        """The stage's own weights of some rounds ago, from whoever kept them."""
        state = self._own_state(donors, WeightsKind.WEIGHTS)
        if state is None:
            return False
        self._replace(state)
        return True

    def _own_state(self, donors: tuple[DonorState, ...], kind: WeightsKind) -> dict[str, Tensor] | None:
        """What one donor has of this very stage; None when it is not what it should be."""
        if len(donors) != 1 or donors[0].stage != self.stage:
            return None
        return snapshot.unpack(donors[0].packets, donors[0].sha256, self._expected(kind))

    def _replace(self, weights: Mapping[str, Tensor]) -> None:
        """Other weights, without what belongs to them: moments and slow weights start anew."""
        for name, weight in self.weights().items():
            weight.copy_(weights[name])
        self._optimizer.restart()
        self._slow.restart(self.flat.weights)
        self._changed()

    def _rebuild(self, donors: tuple[DonorState, ...]) -> bool:
        """From both neighbours, or from the one there is."""
        if self.stage == 0 or any(donor.stage < 1 for donor in donors) or len(donors) not in (1, 2):
            return False
        found = [(donor, self._neighbour_weights(donor)) for donor in sorted(donors, key=lambda d: d.stage)]
        (left, left_weights), (right, right_weights) = found[0], found[-1]
        if left_weights is None or right_weights is None:
            return False
        self._replace(mix(left_weights, right_weights, left.grad_norm, right.grad_norm))
        return True

    def _neighbour_weights(self, donor: DonorState) -> dict[str, Tensor] | None:
        """Under our own names."""
        if donor.stage >= self.spec.num_stages:
            return None
        names = renumbered(self.spec, self.flat.shapes, self.stage, donor.stage)
        weights = snapshot.unpack(donor.packets, donor.sha256, names)
        return None if weights is None else renumbered(self.spec, weights, donor.stage, self.stage)

    def state_for_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies, so that another thread may write them while training goes on; and a dict for JSON."""
        tensors = {
            name: tensor.detach().cpu().clone() for name, tensor in self._state(WeightsKind.FULL).items()
        }
        meta = {
            "stage": self.stage,
            "schema": self.schema,
            "round": self.round,
            "outer_step": self.outer_step,
            "tokens_trained": self.tokens_trained,
        }
        return tensors, meta

    def load_checkpoint(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """ConfigError when it is another stage's or another model's; then nothing was changed."""
        state = snapshot.select(tensors, self._expected(WeightsKind.FULL))
        if state is None or (meta["stage"], meta["schema"]) != (self.stage, self.schema):
            raise ConfigError(
                f"the checkpoint does not fit stage {self.stage}: delete it, or join without --resume"
            )
        self._set_state(state)
        self.round, self.outer_step = meta["round"], meta["outer_step"]
        self.tokens_trained = meta["tokens_trained"]
