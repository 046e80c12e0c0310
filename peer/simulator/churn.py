"""Random churn over a simulated swarm: `gossamer simulate`, the seeds of CI, and the benchmark."""

from __future__ import annotations

import random
from dataclasses import dataclass

from peer.simulator.network import LinkSettings
from peer.simulator.report import Report, Tell
from peer.simulator.swarm import Simulation, tiny_spec
from protocols.errors import ConfigError

STAGES = 5
PEERS_MIN = 2 * STAGES
FIRST_KILL_S = 0.5
MICROBATCH_S = 0.12  # of a swarm of four first-stage peers: where in virtual time the kills shall fall


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """How many misfortunes a run has, each at a drawn moment on a drawn peer."""

    kills: int = 0
    joins: int = 0
    stops: int = 0  # SIGSTOP, and SIGCONT some seconds later
    cuts: int = 0
    leaves: int = 0
    loss_share: float = 0.0


def layout_of(peers: int) -> dict[int, int]:
    """As even as it goes, the first stages richer."""
    if peers < PEERS_MIN:
        raise ConfigError(f"--peers {peers}: at least {PEERS_MIN}, two for each of {STAGES} stages")
    return {stage: peers // STAGES + (stage < peers % STAGES) for stage in range(STAGES)}


def simulate(
    *,
    peers: int,
    seed: int,
    churn: Churn,
    microbatches: int = 200,
    encode: bool = True,
    check: bool = True,
    tell: bool = False,
    planned: bool = False,
) -> Report:
    """Raises InvariantBroken, which names the seed, when a peer's state is wrong on the way.

    `planned`: originators plan rounds together, as in the daemon; it takes longer than all the rest.
    """
    layout = layout_of(peers)
    links = LinkSettings(loss_share=churn.loss_share)
    simulation = Simulation(
        tiny_spec(STAGES, paths={"planned": planned}),
        layout,
        seed,
        encode=encode,
        check=check,
        tell=Tell.ALL if tell else Tell.NOTHING,
        links=links,
    )
    span_s = microbatches * MICROBATCH_S * 4 / layout[0]
    _draw(simulation, churn, random.Random(f"churn/{seed}"), span_s=span_s)
    return simulation.run(until_microbatches=microbatches)


def _draw(simulation: Simulation, churn: Churn, rng: random.Random, *, span_s: float) -> None:
    """One first-stage peer is spared: with none left there is nobody who could lose or keep anything."""
    names = sorted(simulation.members)
    mortal = names[1:]
    rng.shuffle(mortal)
    victims = [mortal[index % len(mortal)] for index in range(churn.kills + churn.leaves + churn.stops)]
    when = [FIRST_KILL_S + rng.random() * span_s for _ in range(len(victims) + churn.joins + churn.cuts)]
    for victim in victims[: churn.kills]:
        simulation.kill(victim, when.pop())
    for leaver in victims[churn.kills : churn.kills + churn.leaves]:
        simulation.leave(leaver, when.pop())
    for stopped in victims[churn.kills + churn.leaves :]:
        at_s = when.pop()
        simulation.stop(stopped, at_s)
        simulation.resume(stopped, at_s + 20 * rng.random())
    for _ in range(churn.joins):
        simulation.join(rng.choice((None, *range(STAGES))), when.pop())
    for _ in range(churn.cuts):
        one, other = rng.sample(names, 2)
        at_s = when.pop()
        simulation.cut(one, other, at_s, at_s + 30 * rng.random())
