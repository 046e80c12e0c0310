"""A device that is asked for is there and works, or the message says why not."""

from __future__ import annotations

import pytest
import torch

from peer.compute.device import pick_device
from protocols.errors import ConfigError


def test_cpu_is_always_there() -> None:
    """And `auto` finds something."""
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "meta", "xla"])
def test_an_unknown_name_is_a_configuration_error(name: str) -> None:
    """`gpu` is what people type."""
    with pytest.raises(ConfigError, match=r"device .* (is unknown|cannot be used here)"):
        pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA card")
def test_a_missing_card_is_named() -> None:
    """Before the peer joins anything."""
    with pytest.raises(ConfigError, match="no CUDA card"):
        pick_device("cuda:0")
