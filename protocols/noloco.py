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
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protocols.run_spec import OuterMode, OuterSpec

PULL_MAX = 1.0
"""A partner moves us at most as far as we go by ourselves. The pull being half of the difference, at gamma 0.7 that is
the clip |phi_j - phi_i| <= tau |Delta_i| with tau 3 (arXiv 2006.09365). Honest pulls are 0.6 of it where only noise is
left to learn. One attacker of eight makes the others' error 1.5 times as large (propose: 1.2), at 2.0 2.7 times."""


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
) -> tuple[Tensor, Tensor]:
    """New (phi, delta). `halves`: the own one, then the partner's, all as decoded; None: alone, a group of one.

    Alone the weight is 1: a half that was made for a partner who then failed is of no further use.
    """
    momentum, move = _alone(spec, phi=phi, theta=theta, delta=delta, weight=weight)
    pull = clip_pull(_pull(phi, halves), reach(spec, phi=phi, theta=theta, delta=delta))
    if spec.mode is OuterMode.PAPER:
        momentum.add_(pull)
        return phi + momentum, momentum
    return move.add_(phi).add_(pull), momentum


def settle(phi: Tensor, halves: Sequence[Tensor], reach: float) -> Tensor:
    """The second pair round: phi and half the difference to another partner's. `halves`: both new phi, as decoded."""
    return clip_pull(_pull(phi, halves), reach).add_(phi)


def reach(spec: OuterSpec, *, phi: Tensor, theta: Tensor, delta: Tensor) -> float:
    """How far the replica goes by itself in this outer step: what all pulls of the step are measured by.

    Paper mode: |Delta|. Propose mode: |y - phi| if that is longer, as proposals differ by momenta, too, which are up to
    1 / (1 - alpha) gradients long and which no pull ever shortens.
    """
    trained = _norm(theta - phi)
    if spec.mode is OuterMode.PAPER:
        return trained
    return max(trained, _norm(_alone(spec, phi=phi, theta=theta, delta=delta)[1]))


def clip_pull(pull: Tensor, reach: float, tau: float = PULL_MAX) -> Tensor:
    """`pull`, at most `tau` times as long as `reach`: all that a broken or hostile partner can do.

    A replica that has done nothing is not moved at all.
    """
    norm, bound = _norm(pull), tau * reach
    if not math.isfinite(norm):  # finite elements, but beyond all measure
        return torch.zeros_like(pull)
    return pull if norm <= bound else pull * (bound / norm)


def _alone(
    spec: OuterSpec, *, phi: Tensor, theta: Tensor, delta: Tensor, weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Momentum, and the Nesterov move; before any pull."""
    scaled = (theta - phi).mul_(spec.beta * weight)
    momentum = (spec.alpha * delta).add_(scaled)
    return momentum, scaled.add_(momentum, alpha=spec.alpha)


def _pull(phi: Tensor, halves: Sequence[Tensor] | None) -> Tensor:
    """Differences first: those of a pair are opposite to the last bit, which two means are not."""
    pull = torch.zeros_like(phi)
    if halves is None:
        return pull
    for other in halves[1:]:
        pull.add_(other - halves[0])
    return pull.div_(len(halves))


def _norm(flat: Tensor) -> float:
    return math.sqrt(float(torch.dot(flat, flat)))
