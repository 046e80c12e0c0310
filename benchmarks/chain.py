"""Stages of one model in one process, chained as the swarm chains them: StageRuntimes without a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peer.compute.stage_runtime import StageRuntime
from peer.evaluate import Batch
from peer.model.llama import Llama
from protocols.messages import WorkKey
from protocols.run_spec import RunSpec


def train_along(path: Sequence[StageRuntime], key: WorkKey, batch: Batch) -> float:
    """One microbatch there and back over `path`, the first stage first; the loss in nats a token."""
    first, *relays = path
    first.put_batch(key, *batch)
    packet = first.forward(key, None, train=True)
    for relay in relays:
        packet = relay.forward(key, packet, train=True)
    loss, gradient = first.loss(key, packet, train=True)
    for runtime in (*reversed(relays), first):
        assert gradient is not None, "every hop but the last hands one on"
        gradient = runtime.backward(key, gradient)
    return loss


def whole_model(spec: RunSpec, stages: Iterable[StageRuntime]) -> Llama:
    """A copy of what the stages hold."""
    model = Llama(spec.model)
    model.load_state_dict({name: w for runtime in stages for name, w in runtime.weights().items()})
    return model
