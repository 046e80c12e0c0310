"""NoLoCo's outer step on flat fp32 tensors: one message to one partner (arXiv 2506.10911).

Paper's symbols: slow weights phi, fast weights theta, outer gradient Delta = theta - phi, outer momentum delta.
In a group of two, both of our modes are a lone step plus half the difference of the two messages ("halves"):

    paper     u = beta Delta + gamma phi                delta <- alpha delta + beta Delta + (u_j - u_i) / 2
                                                        phi   <- phi + delta
    propose   d = alpha delta + beta Delta              delta <- d
              y = phi + beta Delta + alpha d            phi   <- y + (y_j - y_i) / 2

Invariant: the pulls of a pair are opposite, so the mean over replicas is DiLoCo's for any pairing, also when
some step alone or the codec is lossy, as long as the own half is what the partner decoded and no pull was clipped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protocols.run_spec import OuterMode, OuterSpec

PULL_MAX = 3.0  # tau: a partner moves us at most that many of our own moves


def half(spec: OuterSpec, *, phi: Tensor, theta: Tensor, delta: Tensor) -> Tensor:
    """What is sent: u or y above."""
    scaled = spec.beta * (theta - phi)
    if spec.mode is OuterMode.PAPER:
        return scaled.add_(phi, alpha=spec.gamma)
    momentum = spec.alpha * delta + scaled
    return scaled.add_(momentum, alpha=spec.alpha).add_(phi)


def outer_step(
    spec: OuterSpec,
    *,
    phi: Tensor,
    theta: Tensor,
    delta: Tensor,
    halves: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """New (phi, delta). `halves`: the own one and the partner's, both as decoded; None: alone, a group of one."""
    outer_gradient = theta - phi
    momentum = (spec.alpha * delta).add_(outer_gradient, alpha=spec.beta)
    pull = torch.zeros_like(phi) if halves is None else (halves[1] - halves[0]).mul_(0.5)
    measure = _norm(outer_gradient)
    if spec.mode is OuterMode.PAPER:
        momentum.add_(clip_pull(pull, measure))
        return phi + momentum, momentum
    move = outer_gradient.mul_(spec.beta).add_(momentum, alpha=spec.alpha)
    # proposals differ by momenta, too, which are up to 1/(1 - alpha) gradients long; no pull ever enters them here
    pull = clip_pull(pull, max(measure, _norm(move)))
    return move.add_(phi).add_(pull), momentum


def clip_pull(pull: Tensor, measure: float, tau: float = PULL_MAX) -> Tensor:
    """`pull`, at most `tau` times as long as `measure`: all that a broken or hostile partner can do.

    `measure` is the length of what the replica did itself: paper mode, |Delta|; propose mode, |y - phi| if that
    is longer. One that has done nothing is not moved at all.
    """
    norm, bound = _norm(pull), tau * measure
    if not math.isfinite(norm):  # finite elements, but beyond all measure
        return torch.zeros_like(pull)
    return pull if norm <= bound else pull * (bound / norm)


def _norm(flat: Tensor) -> float:
    return math.sqrt(float(torch.dot(flat, flat)))
