"""How far replicas drift apart, against the closed recursion of the second moments; what is stable; and attackers.

Model of the inner phase: Delta = -kappa phi + noise, kappa = 1 - (1 - rate x curvature)^steps, noise of variance s^2.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocols.noloco import PullLimit, half, outer_step
from protocols.pairing import partners
from protocols.run_spec import Codec, OuterMode, OuterSpec, PairSchedule, beta_bound, gamma_bound

WIDTH = 256
KAPPA, NOISE = 0.395, 0.0564
Matrix = NDArray[np.float64]


def paper(alpha: float, gamma: float) -> OuterSpec:
    """Also what the validator refuses: here it is shown why."""
    return OuterSpec(mode=OuterMode.PAPER).model_copy(update={"alpha": alpha, "gamma": gamma, "beta": 0.7})


PROPOSE = OuterSpec(mode=OuterMode.PROPOSE, alpha=0.9, beta=0.7)


def paper_recursion(spec: OuterSpec, kappa: float, count: int, group: int = 2) -> tuple[Matrix, Matrix]:
    """Map and noise of (E x^2, E x delta, E delta^2), x a replica's deviation from the mean of all.

    For pairs c = beta kappa also differs between partners; groups are needed at kappa 0 only.
    """
    alpha, c, r = spec.alpha, spec.beta * kappa, 1 / (count - 1)
    if group == 2:
        p, q = (spec.gamma + c) / 2, (spec.gamma - c) / 2
        first, second = p + q * r, p * p + q * q + 2 * p * q * r
    else:
        pull = 1 - (count - group) / (group * (count - 1))
        first, second = spec.gamma * pull, spec.gamma**2 * pull
    square = np.array([second, -2 * alpha * first, alpha**2])
    cross = np.array([-first, alpha, 0]) + square
    return np.stack(
        [np.array([1 - 2 * first, 2 * alpha, 0]) + square, cross, square]
    ), spec.beta**2 * NOISE**2 * (1 / 2 - 1 / count) * np.ones(3)


def propose_recursion(spec: OuterSpec, kappa: float, count: int) -> tuple[Matrix, Matrix]:
    alpha, c, r = spec.alpha, spec.beta * kappa, 1 / (count - 1)
    own, momentum, fresh = 1 - (1 + alpha) * c, alpha**2, 1 + alpha
    once, twice = 1 / 2 - r / 2, 1 / 2 - r / 2
    moments = np.array([
        [twice * own**2, 2 * twice * own * momentum, twice * momentum**2],
        [-once * own * c, once * (own * alpha - momentum * c), once * momentum * alpha],
        [c * c, -2 * alpha * c, alpha**2],
    ])  # fmt: skip
    noise = np.array([twice * fresh**2, once * fresh, 1]) * spec.beta**2 * NOISE**2 * (1 - 1 / count)
    return moments, noise


def stationary(recursion: tuple[Matrix, Matrix]) -> float:
    moments, noise = recursion
    return float(np.linalg.solve(np.eye(3) - moments, noise)[0])


def growth(recursion: tuple[Matrix, Matrix]) -> float:
    return float(np.abs(np.linalg.eigvals(recursion[0])).max())


class Swarm:
    """Replicas whose slow weights are pulled to 0."""

    def __init__(self, spec: OuterSpec, count: int, *, start: float = 0.0, seed: int = 0) -> None:
        self.spec = spec
        self.random = torch.Generator().manual_seed(seed)
        self.phi = list(start * torch.randn(count, WIDTH, generator=self.random))
        self.delta = [torch.zeros(WIDTH) for _ in range(count)]
        self.limits = [PullLimit() for _ in range(count)]
        self.outer_step = 0

    def step(self, *, common: float | None = None, hostile: Tensor | None = None) -> None:
        """`common`: every element of everybody's Delta; `hostile`: replica 0 sends this instead of its half."""
        noise = NOISE * torch.randn(len(self.phi), WIDTH, generator=self.random)
        theta = [
            (1 - KAPPA) * p + n if common is None else p + common
            for p, n in zip(self.phi, noise, strict=True)
        ]
        state = list(zip(self.phi, theta, self.delta, strict=True))
        halves = [half(self.spec, phi=p, theta=t, delta=d) for p, t, d in state]
        if hostile is not None:
            halves[0] = hostile
        found = partners(
            [f"{number:02d}" for number in range(len(state))], outer_step=self.outer_step, stage=0, fragment=0,
            pair_round=0, rounds=1, seed=0, schedule=PairSchedule.RANDOM,
        )  # fmt: skip
        other = {int(me): int(partner) for me, partner in found.items()}
        stepped = [
            outer_step(
                self.spec,
                phi=p,
                theta=t,
                delta=d,
                halves=(halves[me], halves[other[me]]),
                limit=self.limits[me],
            )
            for me, (p, t, d) in enumerate(state)
        ]
        self.phi, self.delta = [p for p, _ in stepped], [d for _, d in stepped]
        self.outer_step += 1

    @property
    def spread(self) -> float:
        """V_dev: variance between replicas, a coordinate."""
        return float(torch.stack(self.phi).var(0, unbiased=False).mean())


@pytest.mark.parametrize("count", [4, 8, 16])
@pytest.mark.parametrize(
    "spec", [paper(0.0, 1.0), paper(0.5, 0.7), paper(0.8, 0.36), PROPOSE], ids=["0-1", ".5-.7", ".8-.36", "propose"]
)  # fmt: skip
def test_the_spread_is_what_the_recursion_says(spec: OuterSpec, count: int):
    """N2: within 5 % over 500 outer steps."""
    recursion = paper_recursion if spec.mode is OuterMode.PAPER else propose_recursion
    swarm = Swarm(spec, count)
    for _ in range(40):
        swarm.step()
    found = []
    for _ in range(500):
        swarm.step()
        found.append(swarm.spread)
    assert np.mean(found) == pytest.approx(stationary(recursion(spec, KAPPA, count)), rel=0.05)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    ("count", "group"), [(2, 2), (4, 2), (8, 2), (16, 2), (10**7, 2), (12, 3), (16, 4), (8, 8)]
)
def test_the_bound_of_gamma_is_where_the_recursion_stops_contracting(alpha: float, count: int, group: int):
    """Exactly there, for pairs and larger groups."""
    bound = gamma_bound(alpha, replicas=count, group=group)
    for share, stable in ((0.999, True), (1.001, False)):
        recursion = paper_recursion(paper(alpha, share * bound), 0.0, count, group)
        assert (growth(recursion) < 1) == stable


def test_bounds_in_figures():
    """Large swarms; two and four replicas; everybody together as DiLoCo's heavy ball."""
    assert gamma_bound(0.5) == pytest.approx(1.5)
    assert gamma_bound(0.9) == pytest.approx(0.38)
    assert [gamma_bound(0.5, replicas=n) for n in (2, 4, 8, 16)] == pytest.approx(
        [3, 1.8, 1.615, 1.552], abs=1e-3
    )
    assert gamma_bound(0.5, replicas=8, group=8) == beta_bound(OuterMode.PAPER, 0.5) == 3.0
    assert beta_bound(OuterMode.PROPOSE, 0.9) == pytest.approx(1.357, abs=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 0.99])
def test_proposals_come_together_with_every_alpha(alpha: float):
    """Contraction max(1/2, alpha^2) at worst, for every curvature."""
    spec = OuterSpec(mode=OuterMode.PROPOSE, alpha=alpha, beta=0.7)
    worst = max(growth(propose_recursion(spec, kappa, 10**7)) for kappa in np.linspace(0, 1, 21))
    assert worst == pytest.approx(max(0.5, alpha**2), abs=2e-3)


def test_the_published_defaults_drift_apart_and_are_refused():
    """Alpha 0.9, gamma 0.7: inside Eq. 74 of the paper, and more than tenfold apart after 60 steps."""
    refused, recommended = Swarm(paper(0.9, 0.7), 16, start=0.01), Swarm(paper(0.9, 0.19), 16, start=0.01)
    before = refused.spread
    for _ in range(60):
        refused.step(common=1.0)
        recommended.step(common=1.0)
    assert refused.spread > 10 * before
    assert recommended.spread < 0.1 * before
    with pytest.raises(ValueError, match=r"below 2 \(1 - alpha\^2\) = 0.38"):
        OuterSpec(mode=OuterMode.PAPER, alpha=0.9, beta=0.7, gamma=0.7)


@pytest.mark.parametrize("beta", [1.34, 1.37])
def test_a_mean_that_would_swing_up_is_refused(beta: float):
    """Nesterov with alpha 0.9, where inner steps reach their minimum: kappa 1."""
    phi, momentum = 1.0, 0.0
    for _ in range(3000):
        momentum = 0.9 * momentum - beta * phi
        phi = phi - beta * phi + 0.9 * momentum
    stable = beta < beta_bound(OuterMode.PROPOSE, 0.9)
    assert (abs(phi) < 1) == stable
    if not stable:
        with pytest.raises(ValueError, match=r"take beta < 1.36"):
            OuterSpec(mode=OuterMode.PROPOSE, alpha=0.9, beta=beta)


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.TOPK])
def test_codecs_for_changes_are_refused_for_halves(codec: Codec):
    """A half holds the slow weights, fifteen times as long as what was learnt since the last."""
    with pytest.raises(ValueError, match="keeps too little of a half"):
        OuterSpec(codec=codec)


@pytest.mark.parametrize("spec", [paper(0.5, 0.7), PROPOSE], ids=["paper", "propose"])
@pytest.mark.parametrize("offset", [10.0, -3e38])
def test_one_hostile_of_eight_costs_the_honest_less_than_half_more_error(spec: OuterSpec, offset: float):
    """N8: it sends its weights + 10 (rms error of an honest replica without: 0.05), or the largest numbers."""
    errors = {}
    for hostile in (False, True):
        swarm, found = Swarm(spec, 8), []
        for _ in range(300):
            sent = (swarm.phi[0] + offset) if hostile else None
            swarm.step(hostile=sent)
            found.append(torch.stack(swarm.phi[1:]).square().mean())
        errors[hostile] = math.sqrt(float(torch.stack(found[50:]).mean()))
    assert math.isfinite(errors[True])
    assert errors[True] <= 1.5 * errors[False]
