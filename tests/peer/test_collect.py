"""Fetching replicas from donors: the product's own donor machine answers, over a wire that fails as it is told to."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from dht.records import PeerRecord
from peer.collect import Collector, Progress, StageWeights
from peer.compute import snapshot
from peer.compute.snapshot import pack
from peer.model.stage import build_stage
from peer.outbound import MessageRefused, PeerUnreachable
from peer.replicas import AVERAGE, BEST, StageMissing, choose
from protocols.actions import Send, TakeSnapshot
from protocols.donor import SNAPSHOT_FRESH_ROUNDS, SNAPSHOTS_MAX, Donor
from protocols.events import SnapshotTaken
from protocols.messages import Message, WeightsChunk, WeightsKind, WeightsRequest
from protocols.run_spec import preset
from protocols.swarm import PeerInfo, PeerState

SPEC = preset("pico")
READER = "reader"
Twist = Callable[[WeightsChunk], "WeightsChunk | None"]


@dataclass
class Replica:
    """A peer that serves one stage. `twist` is what becomes of a chunk on its way; None: it never arrives."""

    peer: str
    stage: int
    round: int
    twist: Twist = lambda chunk: chunk
    before_send: Callable[[WeightsRequest], None] = lambda request: None
    num_asked: int = 0
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.peer.encode()))
        self.weights = {
            name: weight.detach() + 0.01 * torch.randn(weight.shape, generator=generator)
            for name, weight in build_stage(SPEC, self.stage).state_dict().items()
        }
        self.donor = Donor(self.peer)
        self.donor.stage, self.donor.round = self.stage, self.round

    @property
    def record(self) -> PeerRecord:
        info = PeerInfo(peer=self.peer, stage=self.stage, state=PeerState.SERVING, round=self.round)
        return PeerRecord(info=info)

    def answers(self, request: WeightsRequest) -> list[WeightsChunk]:
        self.num_asked += 1
        actions = self.donor.on_request(READER, request, now=0.0)
        for action in actions:
            if isinstance(action, TakeSnapshot):
                packets, sha256 = pack(self.weights, {})
                taken = SnapshotTaken(
                    kind=action.kind, snapshot=action.snapshot, sha256=sha256, outer_step=1,
                    packets=packets,
                )  # fmt: skip
                actions = self.donor.on_taken(taken, now=0.0)
        sent = [action.message for action in actions if isinstance(action, Send)]
        return [twisted for chunk in sent if (twisted := self.twist(chunk)) is not None]


@dataclass
class Story:
    """One collection from these replicas."""

    replicas: list[Replica]
    said: list[Progress] = field(default_factory=list)
    collector: Collector = field(init=False)

    async def _send(self, to: str, message: Message) -> None:
        assert isinstance(message, WeightsRequest)
        donor = next(one for one in self.replicas if one.peer == to)
        donor.before_send(message)
        for chunk in donor.answers(message):
            asyncio.get_running_loop().call_soon(self.collector.on_message, to, chunk)

    def collect(self, take: str = AVERAGE, **options) -> list[StageWeights]:
        async def run() -> list[StageWeights]:
            self.collector = Collector(SPEC, self._send, self.said.append, **options)
            plans = choose([one.record for one in self.replicas], SPEC.num_stages, take)
            return list(await self.collector.collect(plans))

        return asyncio.run(run())

    def problems(self) -> dict[str, str]:
        return {one.donor: one.problem for one in self.said if one.problem}

    def lose(self, replica: Replica) -> None:
        asyncio.get_running_loop().call_soon(self.collector.on_unreachable, replica.peer)


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of pico in some twenty of them, so that there is a middle to be lost in."""
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 8 << 10)


def five(**changes: Replica) -> tuple[Story, dict[str, Replica]]:
    replicas = {
        name: changes.get(name, Replica(name, int(name[1]), round_))
        for name, round_ in {"a0": 30, "b1": 30, "c1": 29, "d2": 30, "e2": 28}.items()
    }
    return Story(list(replicas.values())), replicas


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], w) for n, w in expected.items())


def mean(*replicas: Replica) -> dict[str, Tensor]:
    return {
        name: torch.stack([one.weights[name].double() for one in replicas]).mean(0).float()
        for name in replicas[0].weights
    }


def failing_send(error: Exception) -> Callable[[WeightsRequest], None]:
    def fail(request: WeightsRequest) -> None:
        raise error

    return fail


def test_each_stage_is_the_mean_of_its_replicas_each_asked_once():
    story, peers = five()
    stages = story.collect()
    assert [stage.stage for stage in stages] == [0, 1, 2]
    assert same(stages[0].weights, peers["a0"].weights)
    assert same(stages[1].weights, mean(peers["b1"], peers["c1"]))
    assert same(stages[2].weights, mean(peers["d2"], peers["e2"]))
    assert [(one.peer, one.round, one.outer_step) for one in stages[2].came] == [("d2", 30, 1), ("e2", 28, 1)]
    assert stages[0].spread == 0.0
    assert 0.1 < stages[1].spread < 1.0  # weights of 0.02 and less, apart by 0.01
    whole = {one.donor: one for one in story.said if one.share == 1.0}
    for stage in stages:
        assert not stage.failed
        assert stage.single is None
        for came in stage.came:
            chunks = -(-came.num_bytes // snapshot.CHUNK_BYTES)
            assert peers[came.peer].num_asked == chunks > 5
            assert whole[came.peer].num_bytes == came.num_bytes


def test_best_asks_one_of_each_stage_and_a_name_that_one():
    story, peers = five()
    stages = story.collect(BEST)
    assert [one.peer for stage in stages for one in stage.came] == ["a0", "b1", "d2"]
    assert same(stages[2].weights, peers["d2"].weights)
    assert peers["c1"].num_asked == peers["e2"].num_asked == 0
    story, peers = five()
    stages = story.collect("e2")
    assert same(stages[1].weights, mean(peers["b1"], peers["c1"]))
    assert same(stages[2].weights, peers["e2"].weights)


def test_the_single_replica_kept_beside_the_mean_is_the_newest():
    story, peers = five()
    stages = story.collect(keep_single=True)
    for stage, newest in zip(stages, ("a0", "b1", "d2"), strict=True):
        assert stage.single is not None
        assert same(stage.single, peers[newest].weights)


# ---- donors that fail ----------------------------------------------------------------------------


def nothing_from(index: int) -> Twist:
    return lambda chunk: None if chunk.index >= index else chunk


def flipped(chunk: WeightsChunk) -> WeightsChunk:
    """One bit of the last tensor's bytes."""
    if chunk.index < chunk.count - 1:
        return chunk
    assert chunk.packet is not None
    data = bytearray(chunk.packet.data)
    data[-2] ^= 1
    return replace(chunk, packet=replace(chunk.packet, data=bytes(data)))


@pytest.mark.parametrize(
    ("twist", "before_send", "problem"),
    [
        (nothing_from(3), None, "was silent for 1 s"),
        (flipped, None, "sent something else than its hash"),
        (lambda chunk: replace(chunk, count=chunk.count + chunk.index), None, "contradicts itself"),
        (None, failing_send(PeerUnreachable("b1", "dial-failed")), r"is out of reach \(dial-failed\)"),
        (None, failing_send(MessageRefused("b1", "ignored")), r"is out of reach \(ignored\)"),
    ],
    ids=["silent", "bit flipped", "contradiction", "dead", "not listening"],
)
@pytest.mark.parametrize("take", [BEST, AVERAGE])
def test_another_replica_does_for_one_that_fails(take, twist, before_send, problem):
    """`b1` would be the first choice. What it gave before it failed is in no sum."""
    bad = Replica("b1", 1, 30)
    bad.twist, bad.before_send = twist or bad.twist, before_send or bad.before_send
    story, peers = five(b1=bad)
    stages = story.collect(take, chunk_limit_s=1.0)
    assert same(stages[1].weights, peers["c1"].weights)
    assert [one.peer for one in stages[1].came] == ["c1"]
    assert list(stages[1].failed) == list(story.problems()) == ["b1"]
    assert story.problems()["b1"] == stages[1].failed["b1"]
    assert re.search(problem, stages[1].failed["b1"])


def test_a_donor_killed_between_two_chunks_is_replaced_at_once():
    """Its streams break while its third chunk is awaited: nobody waits for a deadline."""
    bad = Replica("b1", 1, 30, twist=nothing_from(2))
    story, peers = five(b1=bad)
    bad.before_send = lambda request: story.lose(bad) if request.index == 2 else None
    stages = story.collect(BEST, chunk_limit_s=3600.0)
    assert same(stages[1].weights, peers["c1"].weights)
    assert stages[1].failed == {"b1": "was lost on the way"}


def test_a_donor_that_sends_too_much_is_stopped():
    """Each chunk names a state of many more; without a bound the reader would keep them all."""
    bad = Replica("b1", 1, 30)
    big = bytes(1 << 20)

    def flood(chunk: WeightsChunk) -> WeightsChunk:
        assert chunk.packet is not None
        return replace(chunk, count=1000, packet=replace(chunk.packet, data=big, shape=(len(big),)))

    bad.twist = flood
    story, peers = five(b1=bad)
    stages = story.collect(BEST)
    assert same(stages[1].weights, peers["c1"].weights)
    assert stages[1].failed == {"b1": "sends too much"}
    assert bad.num_asked < 8  # 4 MiB of header may be, and the weights


def busy(replica: Replica) -> None:
    """All its snapshots are held for others."""
    for number in range(SNAPSHOTS_MAX):
        replica.donor._taking[WeightsKind.WEIGHTS] = name = f"held-{number}"
        replica.donor.on_taken(
            SnapshotTaken(kind=WeightsKind.WEIGHTS, snapshot=name, sha256="", outer_step=0, packets=()),
            now=0.0,
        )
    replica.donor.round += SNAPSHOT_FRESH_ROUNDS + 1  # too old to be served again


def test_a_donor_that_refuses_is_asked_again_when_its_leases_may_have_ended():
    """It would have been missing in the mean only because two joiners came at the same time."""
    story, peers = five()
    busy(peers["b1"])

    def freed(request: WeightsRequest) -> None:
        if peers["b1"].num_asked == 1:
            peers["b1"].donor.on_deadline(now=1e6)

    peers["b1"].before_send = freed
    stages = story.collect(refused_pause_s=0.0)
    assert same(stages[1].weights, mean(peers["b1"], peers["c1"]))
    assert not stages[1].failed
    assert story.problems() == {"b1": "refuses"}


def test_a_stage_that_nobody_gives_ends_it_all_with_every_reason():
    story, peers = five()
    busy(peers["b1"])
    peers["c1"].before_send = failing_send(PeerUnreachable("c1", "dial-failed"))
    names = {peer: peers[peer].record.friendly_name for peer in ("b1", "c1")}
    with pytest.raises(StageMissing) as missing:
        story.collect(refused_pause_s=0.0)
    assert str(missing.value).startswith("no replica of stage 1 gave its weights: ")
    assert f"{names['b1']} refuses" in str(missing.value)
    assert f"{names['c1']} is out of reach (dial-failed)" in str(missing.value)
    assert peers["b1"].num_asked == 3


def test_chunks_that_nobody_asked_for_are_not_kept():
    """A stranger's, and a donor's that pushes: what waits to be read is bounded."""
    bad = Replica("b1", 1, 30, twist=nothing_from(1))
    story, peers = five(b1=bad)

    def push(request: WeightsRequest) -> None:
        for _ in range(1000):
            late = replace(spam, index=999)
            story.collector.on_message("b1", late)
            story.collector.on_message("stranger", late)
        assert story.collector._chunks["b1"].qsize() <= 2
        assert "stranger" not in story.collector._chunks

    (spam,) = Replica("b1", 1, 30).answers(
        WeightsRequest(kind=WeightsKind.WEIGHTS, stage=1, snapshot="", index=0)
    )
    bad.before_send = push
    stages = story.collect(BEST, chunk_limit_s=1.0)
    assert same(stages[1].weights, peers["c1"].weights)
