"""The chain of experts with float16 on the wire: the library's nearest to our bf16, and its best here."""

from __future__ import annotations

from functools import partial

from hivemind.proto.runtime_pb2 import CompressionType

from benchmarks.baselines import moe

train = partial(moe.train, compression=CompressionType.FLOAT16)
