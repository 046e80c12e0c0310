"""NoLoCo's maths against the formulas as written down, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from protocols.actions import FOLLOWS
from protocols.noloco import PULL_MAX, PULL_MIN, PullLimit, half, outer_step, settle, token_weight
from protocols.run_spec import Codec, OuterMode, OuterSpec
from protocols.tensor_codec import decode, encode

PAPER = OuterSpec(mode=OuterMode.PAPER, alpha=0.5, beta=0.7, gamma=0.9)
PROPOSE = OuterSpec(mode=OuterMode.PROPOSE, alpha=0.9, beta=0.7)
SPECS = [pytest.param(PAPER, id="paper"), pytest.param(PROPOSE, id="propose")]
WIDTH = 40


class Replicas:
    """Slow weights and momenta [replica, WIDTH], stepped in pairs through the functions under test."""

    def __init__(self, spec: OuterSpec, count: int, *, spread: float = 1e-3, seed: int = 0) -> None:
        self.spec = spec
        self.random = torch.Generator().manual_seed(seed)
        common = torch.randn(WIDTH, generator=self.random, dtype=torch.float64)
        self.phi = common + spread * torch.randn(count, WIDTH, generator=self.random, dtype=torch.float64)
        self.delta = torch.zeros_like(self.phi)
        self.limits = [PullLimit() for _ in self.phi]

    def train(self) -> Tensor:
        """Fast weights after some inner steps: mostly the same direction for all replicas."""
        noise = torch.randn(self.phi.shape, generator=self.random, dtype=torch.float64)
        return self.phi - 0.1 * (self.phi - self.phi.mean(0)) + 0.2 + 0.02 * noise

    def pairs(self, *, failed_share: float) -> list[tuple[int, int | None]]:
        """A random matching of the replicas; the odd one and both of a failed pair step alone."""
        order = torch.randperm(len(self.phi), generator=self.random).tolist()
        found: list[tuple[int, int | None]] = []
        while order:
            left, right = order.pop(), order.pop() if order else None
            if torch.rand(1, generator=self.random).item() < failed_share:
                found += [(left, None)] + ([(right, None)] if right is not None else [])
            else:
                found += [(left, right)] + ([(right, left)] if right is not None else [])
        return found

    def step(self, theta: Tensor, pairs: list[tuple[int, int | None]], codec: Codec = Codec.RAW) -> None:
        halves = [
            half(self.spec, phi=p, theta=t, delta=d)
            for p, t, d in zip(self.phi, theta, self.delta, strict=True)
        ]
        if codec is not Codec.RAW:
            halves = [decode(encode(h.float(), codec)).double() for h in halves]
        new_phi, new_delta = torch.empty_like(self.phi), torch.empty_like(self.delta)
        for me, partner in pairs:
            new_phi[me], new_delta[me] = outer_step(
                self.spec,
                phi=self.phi[me],
                theta=theta[me],
                delta=self.delta[me],
                halves=None if partner is None else (halves[me], halves[partner]),
                limit=self.limits[me],
            )
        self.phi, self.delta = new_phi, new_delta


class MeanDiLoCo:
    """What the mean of the replicas must do, whoever averages with whom."""

    def __init__(self, replicas: Replicas) -> None:
        self.spec = replicas.spec
        self.phi, self.delta = replicas.phi.mean(0), replicas.delta.mean(0)

    def step(self, theta: Tensor, phi: Tensor) -> None:
        outer_gradient = (theta - phi).mean(0)
        self.delta = self.spec.alpha * self.delta + self.spec.beta * outer_gradient
        if self.spec.mode is OuterMode.PAPER:  # heavy ball
            self.phi = self.phi + self.delta
        else:  # Nesterov
            self.phi = self.phi + self.spec.beta * outer_gradient + self.spec.alpha * self.delta


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("count", "failed_share", "codec"),
    [(8, 0.0, Codec.RAW), (7, 0.3, Codec.RAW), (7, 0.3, Codec.INT8)],
)
def test_the_mean_of_the_replicas_follows_diloco(
    spec: OuterSpec, count: int, failed_share: float, codec: Codec
) -> None:
    """N1: 100 outer steps, odd numbers, failed pairs, lossy messages: to 1e-12."""
    replicas = Replicas(spec, count)
    reference = MeanDiLoCo(replicas)
    for _ in range(100):
        theta = replicas.train()
        reference.step(theta, replicas.phi)
        replicas.step(theta, replicas.pairs(failed_share=failed_share), codec)
        torch.testing.assert_close(replicas.phi.mean(0), reference.phi, atol=1e-12, rtol=0)


def test_paper_mode_is_the_published_update() -> None:
    """delta_i <- alpha delta_i + beta mean(Delta) - gamma (phi_i - mean(phi)), with two messages, written out."""
    replicas = Replicas(PAPER, 2)
    for _ in range(5):
        theta, phi, delta = replicas.train(), replicas.phi, replicas.delta
        replicas.step(theta, [(0, 1), (1, 0)])
        expected = (
            PAPER.alpha * delta + PAPER.beta * (theta - phi).mean(0) - PAPER.gamma * (phi - phi.mean(0))
        )
        torch.testing.assert_close(replicas.delta, expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(replicas.phi, phi + expected, atol=1e-12, rtol=0)


def test_propose_mode_averages_nesterov_proposals() -> None:
    """After an outer step both replicas of a pair hold the same slow weights."""
    replicas = Replicas(PROPOSE, 2)
    theta, phi, delta = replicas.train(), replicas.phi, replicas.delta
    replicas.step(theta, [(0, 1), (1, 0)])
    momentum = PROPOSE.alpha * delta + PROPOSE.beta * (theta - phi)
    proposals = phi + PROPOSE.beta * (theta - phi) + PROPOSE.alpha * momentum
    torch.testing.assert_close(replicas.phi, proposals.mean(0).expand(2, -1), atol=1e-12, rtol=0)
    torch.testing.assert_close(replicas.delta, momentum, atol=1e-12, rtol=0)


def test_with_gamma_equal_to_beta_the_fast_weights_are_the_message() -> None:
    """Half of the published bytes: u = beta theta."""
    spec = OuterSpec(mode=OuterMode.PAPER, alpha=0.5, beta=0.7, gamma=0.7)
    phi, theta, delta = torch.randn(3, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(half(spec, phi=phi, theta=theta, delta=delta), 0.7 * theta)


@pytest.mark.parametrize("spec", SPECS)
def test_a_group_of_all_is_diloco(spec: OuterSpec) -> None:
    """N2: n = N, to 1e-12, from replicas that agree; then gamma has nothing to pull."""
    replicas = Replicas(spec, 5, spread=0.0)
    reference = MeanDiLoCo(replicas)
    for _ in range(20):
        theta = replicas.train()
        reference.step(theta, replicas.phi)
        state = list(zip(replicas.phi, theta, replicas.delta, strict=True))
        halves = [half(spec, phi=p, theta=t, delta=d) for p, t, d in state]
        stepped = [
            outer_step(
                spec,
                phi=p,
                theta=t,
                delta=d,
                halves=[halves[me], *halves[:me], *halves[me + 1 :]],
                limit=replicas.limits[me],
            )
            for me, (p, t, d) in enumerate(state)
        ]
        replicas.phi, replicas.delta = (torch.stack(values) for values in zip(*stepped, strict=True))
        torch.testing.assert_close(replicas.phi, reference.phi.expand(5, -1), atol=1e-12, rtol=0)
        if spec.mode is OuterMode.PAPER:  # proposals carry momenta that differ; only their mean is DiLoCo's
            torch.testing.assert_close(replicas.delta, reference.delta.expand(5, -1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_the_outer_gradient_is_weighed_by_tokens_and_the_pull_is_not(spec: OuterSpec) -> None:
    """A slow machine's 1,000 tokens count a third of the other's 3,000; its weights count as much."""
    phi, theta, delta = (torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(3))
    weights = [token_weight(own, (1000, 3000)) for own in (1000, 3000)]
    assert weights == [0.5, 1.5]
    halves = [half(spec, phi=phi[i], theta=theta[i], delta=delta[i], weight=weights[i]) for i in (0, 1)]
    new_phi, _ = outer_step(
        spec, phi=phi[0], theta=theta[0], delta=delta[0], halves=halves, weight=weights[0], limit=PullLimit()
    )
    outer_gradient = 0.25 * (theta - phi)[0] + 0.75 * (theta - phi)[1]
    if spec.mode is OuterMode.PAPER:
        pull = spec.gamma * (phi[0] - phi.mean(0))
        expected = phi[0] + spec.alpha * delta[0] + spec.beta * outer_gradient - pull
    else:
        expected = phi.mean(0) + spec.beta * (1 + spec.alpha) * outer_gradient + spec.alpha**2 * delta.mean(0)
    torch.testing.assert_close(new_phi, expected, atol=1e-12, rtol=0)


def test_replicas_without_tokens_count_alike() -> None:
    """Both have just joined: nothing to weigh."""
    assert token_weight(0, (0, 0)) == 1.0
    assert token_weight(7, (7,)) == 1.0


@pytest.mark.parametrize("spec", SPECS)
def test_a_second_pair_round_halves_the_spread_and_keeps_the_mean(spec: OuterSpec) -> None:
    """0-1, 2-3, then 1-2, 3-0: four replicas hold one mean; exactly, in mode propose."""
    replicas = Replicas(spec, 4)
    replicas.step(replicas.train(), [(0, 1), (1, 0), (2, 3), (3, 2)])
    before = replicas.phi
    other = [3, 2, 1, 0]
    after = torch.stack(
        [settle(before[i], (before[i], before[other[i]]), replicas.limits[i]) for i in range(4)]
    )
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=1e-14, rtol=0)
    torch.testing.assert_close(after, (before + before[other]) / 2, atol=1e-14, rtol=0)
    if spec.mode is OuterMode.PROPOSE:
        torch.testing.assert_close(after, before.mean(0).expand(4, -1), atol=1e-14, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_equal_replicas_stay_equal(spec: OuterSpec) -> None:
    """N3: a fixed point, over 20 rounds, bit for bit."""
    replicas = Replicas(spec, 4, spread=0.0)
    for _ in range(20):
        theta = replicas.train()[:1].expand(4, -1).clone()
        replicas.step(theta, replicas.pairs(failed_share=0.0))
        assert all(torch.equal(replicas.phi[0], other) for other in replicas.phi)


@pytest.mark.parametrize("spec", SPECS)
def test_paired_replicas_come_together(spec: OuterSpec) -> None:
    """With the same gradients and random pairs the spread decays; alone it would only be carried along."""
    replicas = Replicas(spec, 8, spread=1e-3)
    before = replicas.phi.var(0).mean()
    for _ in range(30):
        step = torch.full((WIDTH,), 0.1, dtype=torch.float64)
        replicas.step(replicas.phi + step, replicas.pairs(failed_share=0.0))
    assert replicas.phi.var(0).mean() < 1e-3 * before


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("offset", [10.0, -1e6, 3e38])
def test_a_hostile_half_moves_us_little_further_than_we_go_ourselves(spec: OuterSpec, offset: float) -> None:
    """N8: phi + 10 from one of sixteen must not drag the honest along; the largest finite numbers make no NaN."""
    phi, delta = torch.randn(WIDTH), torch.zeros(WIDTH)
    theta = phi + 0.01 * torch.randn(WIDTH)
    own_half = half(spec, phi=phi, theta=theta, delta=delta)
    alone, _ = outer_step(spec, phi=phi, theta=theta, delta=delta, limit=PullLimit())
    hostile = (own_half, own_half + offset)
    pulled, momentum = outer_step(spec, phi=phi, theta=theta, delta=delta, halves=hostile, limit=PullLimit())
    assert pulled.isfinite().all()
    assert momentum.isfinite().all()
    own_move = max((theta - phi).norm(), (alone - phi).norm())
    assert (pulled - alone).norm() <= PULL_MIN * own_move * (1 + 1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_a_replica_without_work_follows_its_partner(spec: OuterSpec) -> None:
    """Averaged in, it would hold the partner back by half of all that this has learned since they last met."""
    replicas = Replicas(spec, 2)
    theta, phi, delta, limit = replicas.train(), replicas.phi, replicas.delta, PullLimit()
    leading = half(spec, phi=phi[0], theta=theta[0], delta=delta[0])
    alone, _ = outer_step(spec, phi=phi[0], theta=theta[0], delta=delta[0], limit=PullLimit())
    own = half(spec, phi=phi[1], theta=phi[1], delta=delta[1], weight=FOLLOWS)
    halves = (own, leading)
    followed, _ = outer_step(
        spec, phi=phi[1], theta=phi[1], delta=delta[1], halves=halves, weight=FOLLOWS, limit=limit
    )
    remains = 1 - spec.gamma if spec.mode is OuterMode.PAPER else 0.0
    torch.testing.assert_close(followed - alone, remains * (phi[1] - phi[0]), atol=1e-12, rtol=0)


def test_a_short_pull_passes_unclipped_and_a_long_one_keeps_its_direction() -> None:
    """The gate must not touch honest averaging: there the invariant of the mean would break."""
    limit = PullLimit()
    limit.trained(15.0)
    honest, hostile = torch.tensor([9.0, 12.0]), torch.tensor([-600.0, 800.0])
    assert limit.clip(honest) is honest
    torch.testing.assert_close(limit.clip(hostile), torch.tensor([-13.5, 18.0]))  # 1.5 of the one before


def test_the_limit_learns_what_is_usual_and_few_hostile_pulls_teach_it_nothing() -> None:
    """Replicas with unequal work differ by more than one goes by itself: twice, here. One of eight pulls is a lie."""
    limit = PullLimit()
    for number in range(32):
        limit.trained(1.0)
        limit.clip(torch.tensor([1e6 if number % 8 == 0 else 2.0]))
        assert limit.limit <= PULL_MAX
    assert limit.limit == pytest.approx(3.0)
    assert float(limit.clip(torch.tensor([2.5]))) == 2.5


def test_only_who_knows_no_measure_follows_anywhere_and_a_joiner_gets_it_from_its_donor() -> None:
    """The snapshot carries it; an idle replica has the measure of its former moves."""
    donor, joiner = PullLimit(), PullLimit()
    assert joiner.limit == math.inf
    for _ in range(3):
        donor.trained(2.0)
    donor.clip(torch.tensor([0.5]))
    joiner.set_state(donor.state())
    joiner.trained(0.0)
    assert joiner.limit == 2.0
    assert torch.equal(joiner.state(), donor.state())


def test_many_tiny_updates_add_up() -> None:
    """N3: 1,000 steps of a sixteenth of a bf16 ulp would vanish if slow weights were kept in bf16."""
    phi, delta = torch.ones(4), torch.zeros(4)
    spec, limit = OuterSpec(mode=OuterMode.PAPER, alpha=0.0, beta=1.0, gamma=1.0), PullLimit()
    for _ in range(1000):
        phi, delta = outer_step(spec, phi=phi, theta=phi + 2.0**-12, delta=delta, limit=limit)
    assert math.isclose(float(phi[0]), 1 + 1000 * 2.0**-12, rel_tol=1e-4)
