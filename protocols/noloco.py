"""NoLoCo's outer step on flat fp32 tensors: one message to each partner (arXiv 2506.10911).

Paper's symbols: slow weights phi, fast weights theta, outer gradient Delta = theta - phi, outer momentum delta.
In a group of n, a pair on the wire, both of our modes are a lone step plus the mean difference of the others'
messages ("halves") to our own:

    paper     u = beta Delta + gamma phi                delta <- alpha delta + beta Delta + mean(u_j - u_i)
                                                        phi   <- phi + delta
    propose   d = alpha delta + beta Delta              delta <- d
              y = phi + beta Delta + alpha d            phi   <- y + mean(y_j - y_i)

where the mean counts our own zero, so that of a pair is half the difference. A second pair round of the same outer
step sends the new phi, and pulls by half the difference again (`settle`).

Invariant: the pulls of a group add up to zero, so the mean over replicas is DiLoCo's for any grouping, also when some
step alone or the codec is lossy, as long as the own half is what the partner decoded and no pull was clipped.

Tokens: replicas that trained unequally long weigh Delta, and Delta alone, by the tokens behind it. Each multiplies its
own Delta by `token_weight` before it makes its half, for which both must know both numbers; one message remains enough.
A replica that has trained on nothing has nothing to say: it takes the mean of the others' halves, and they step without
it. Were it averaged in, it would hold them back, by half of all they have learned since it last met them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from protocols.actions import FOLLOWS
from protocols.run_spec import OuterMode, OuterSpec

PULL_MIN, PULL_MAX = 1.0, 3.0
"""A partner may always move us as far as we usually go by ourselves, and never more than three times as far.

The pull being half of the difference, at gamma 0.7 that is the clip |phi_j - phi_i| <= tau |Delta_i| with tau 3 to 9
(arXiv 2006.09365). Honest pulls are 0.6 of the own way where only noise is left to learn, and more where replicas got
unequal work. At 1.0 one attacker of eight makes the others' error 1.5 times as large (propose: 1.2), at 2.0 2.7 times.
"""
PULL_USUAL = 1.5  # times the median of past pulls is nothing unusual; hostile partners are the few
PULLS_KEPT = 16


class PullLimit:
    """How far partners may move a replica in an outer step: it learns what is usual between these two ends.

    The own way is the longer of this step's and the median of former ones: a replica that got no work this time must
    still follow, else it holds its partner back, step after step, where it stands. One that has never trained, nor
    been told by a donor what is usual, has nothing to lose and follows anywhere.
    """

    def __init__(self) -> None:
        self._ways: deque[float] = deque(maxlen=PULLS_KEPT)  # |own move|, of steps that had one
        self._pulls: deque[float] = deque(maxlen=PULLS_KEPT)  # |pull|, as it came
        self._own = 0.0

    def trained(self, own: float) -> None:
        """Own way of this outer step, from `reach`."""
        self._own = own
        if own > 0:
            self._ways.append(own)

    def clip(self, pull: Tensor) -> Tensor:
        """`pull`, no longer than is usual: all that a broken or hostile partner can do."""
        norm = _norm(pull)
        if not math.isfinite(norm):  # finite elements, but beyond all measure
            return torch.zeros_like(pull)
        limit = self.limit
        self._pulls.append(norm)
        return pull if norm <= limit else pull * (limit / norm)

    @property
    def limit(self) -> float:
        if not self._ways:
            return math.inf
        own = max(self._own, median(self._ways))
        usual = PULL_USUAL * median(self._pulls) if self._pulls else 0.0
        return min(max(usual, PULL_MIN * own), PULL_MAX * own)

    def state(self) -> Tensor:
        """[2, PULLS_KEPT], for a joiner: ways and pulls, the newest last, zeros before them."""
        rows = [[0.0] * (PULLS_KEPT - len(known)) + list(known) for known in (self._ways, self._pulls)]
        return torch.tensor(rows)

    def set_state(self, state: Tensor) -> None:
        for known, row_K in zip((self._ways, self._pulls), state, strict=True):
            known.clear()
            known.extend(float(value) for value in row_K if value > 0)
        self._own = 0.0


def token_weight(own_tokens: int, all_tokens: Sequence[int]) -> float:
    """n w_i / sum(w): with it the plain mean over a group of n is the mean weighted by tokens; alone it is 1."""
    total = sum(all_tokens)
    return len(all_tokens) * own_tokens / total if total else 1.0


def half(spec: OuterSpec, *, phi: Tensor, theta: Tensor, delta: Tensor, weight: float = 1.0) -> Tensor:
    """What is sent: u or y above. `weight`: the group's `token_weight`."""
    if spec.mode is OuterMode.PAPER:
        return (theta - phi).mul_(spec.beta * weight).add_(phi, alpha=spec.gamma)
    _, move = _alone(spec, phi=phi, theta=theta, delta=delta, weight=weight)
    return move.add_(phi)


def outer_step(
    spec: OuterSpec,
    *,
    phi: Tensor,
    theta: Tensor,
    delta: Tensor,
    halves: Sequence[Tensor] | None = None,
    weight: float = 1.0,
    limit: PullLimit,
) -> tuple[Tensor, Tensor]:
    """New (phi, delta). `halves`: the own one, then the partner's, all as decoded; None: alone, a group of one.

    `weight`: as the own half was made with; FOLLOWS: all the way to the others. Alone the weight is 1: a half that was
    made for a partner who then failed is of no further use.
    """
    momentum, move = _alone(spec, phi=phi, theta=theta, delta=delta, weight=weight)
    limit.trained(reach(spec, phi=phi, theta=theta, delta=delta))
    pull = torch.zeros_like(phi)
    if halves is not None:
        share = len(halves) / (len(halves) - 1) if weight == FOLLOWS else 1.0
        pull = limit.clip(_pull(phi, halves).mul_(share))
    if spec.mode is OuterMode.PAPER:
        momentum.add_(pull)
        return phi + momentum, momentum
    return move.add_(phi).add_(pull), momentum


def settle(phi: Tensor, halves: Sequence[Tensor], limit: PullLimit) -> Tensor:
    """The second pair round: phi and half the difference to another partner's. `halves`: both new phi, as decoded."""
    return limit.clip(_pull(phi, halves)) + phi


def reach(spec: OuterSpec, *, phi: Tensor, theta: Tensor, delta: Tensor) -> float:
    """How far the replica goes by itself in this outer step: what all pulls of the step are measured by.

    Paper mode: |Delta|. Propose mode: |y - phi| if that is longer, as proposals differ by momenta, too, which are up to
    1 / (1 - alpha) gradients long and which no pull ever shortens.
    """
    trained = _norm(theta - phi)
    if spec.mode is OuterMode.PAPER:
        return trained
    return max(trained, _norm(_alone(spec, phi=phi, theta=theta, delta=delta)[1]))


def _alone(
    spec: OuterSpec, *, phi: Tensor, theta: Tensor, delta: Tensor, weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Momentum, and the Nesterov move; before any pull."""
    scaled = (theta - phi).mul_(spec.beta * weight)
    momentum = (spec.alpha * delta).add_(scaled)
    return momentum, scaled.add_(momentum, alpha=spec.alpha)


def _pull(phi: Tensor, halves: Sequence[Tensor]) -> Tensor:
    """Differences first: those of a pair are opposite to the last bit, which two means are not."""
    pull = torch.zeros_like(phi)
    for other in halves[1:]:
        pull.add_(other - halves[0])
    return pull.div_(len(halves))


def _norm(flat: Tensor) -> float:
    return math.sqrt(float(torch.dot(flat, flat)))
