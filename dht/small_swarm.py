# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""The table of a small swarm with few calls: while everybody is in the routing table we know who keeps which
key.

hivemind's own way walks the table key by key, as it must in a large one: with 8 peers a poll of the 16 shards
took 28 calls and 86 ms of CPU over all processes, a third of a core for a swarm that polls every 2 s. Here it
is 3 calls and 9 ms. Each entry is judged alone, where hivemind drops a whole shard for one bad entry.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from dht.directory import PLAIN, DirectoryUnavailable

COPIES_READ = 2  # of the five there are: one that missed a store is outvoted, and the next poll asks others

_KeyT = TypeVar("_KeyT")
_NodeT = TypeVar("_NodeT")
Entries = dict[str, tuple[bytes, float]]
"""Sealed entry and expiry (unix seconds) by subkey."""


def choose_replicas(
    replicas: Mapping[_KeyT, Sequence[_NodeT]], copies: Mapping[_KeyT, int], rng: random.Random
) -> dict[_NodeT, list[_KeyT]]:
    """Few nodes to ask, with the keys to ask each for, so that key k is read from `copies[k]` of its
    replicas.

    Greedy set cover, ties by lot, so that polls take turns. A key with fewer replicas is read from all of
    them.
    """
    missing = {key: min(copies[key], len(nodes)) for key, nodes in replicas.items()}
    candidates = list(dict.fromkeys(node for nodes in replicas.values() for node in nodes))
    rng.shuffle(candidates)
    chosen: dict[_NodeT, list[_KeyT]] = {}
    while any(missing.values()):
        gains = {
            node: [key for key, nodes in replicas.items() if missing[key] and node in nodes]
            for node in candidates
            if node not in chosen
        }
        best = max(gains, key=lambda node: len(gains[node]))
        chosen[best] = gains[best]
        for key in gains[best]:
            missing[key] -= 1
    return chosen


def knows_whole_swarm(node: DHTNode) -> bool:
    """As long as no bucket of the routing table has overflown, nobody is missing from it."""
    return len(node.protocol.routing_table.uid_to_peer_id) < node.protocol.bucket_size


async def read_replicas(node: DHTNode, keys: Iterable[str], rng: random.Random) -> dict[str, Entries]:
    """The newest entries of two replicas of each key, our own store being one where it is one."""
    ids = {DHTID.generate(key): key for key in keys}
    found = {key_id: _own_entries(node, key_id) for key_id in ids}
    others = {key_id: _other_replicas(node, key_id) for key_id in ids}
    copies = {key_id: COPIES_READ - _is_replica(node, key_id, others[key_id]) for key_id in ids}
    plan = choose_replicas(others, copies, rng)
    answers = await asyncio.gather(*(_ask(node, replica, key_ids) for replica, key_ids in plan.items()))
    if plan and not any(answer is not None for answer in answers):
        raise DirectoryUnavailable(f"none of {len(plan)} peers answered")
    for answer in answers:
        for key_id, entries in (answer or {}).items():
            _merge(found[key_id], entries)
    return {ids[key_id]: entries for key_id, entries in found.items() if entries}


async def store_replicas(
    node: DHTNode, key: str, subkey: str | None, sealed: bytes, expiry_unix_s: float
) -> bool:
    """Whether at least one of the nodes that should keep this entry took it."""
    key_id = DHTID.generate(key)
    others = _other_replicas(node, key_id)
    own = _is_replica(node, key_id, others)
    blob = MSGPackSerializer.dumps(sealed)
    stored = own and _store_own(node, key_id, subkey, blob, expiry_unix_s)
    peers: Any = [node.protocol.routing_table[other] for other in others[: node.num_replicas - own]]
    calls = (node.protocol.call_store(peer, [key_id], [blob], expiry_unix_s, [subkey]) for peer in peers)
    return any([stored, *(all(answer or [False]) for answer in await asyncio.gather(*calls))])


def _store_own(node: DHTNode, key_id: DHTID, subkey: str | None, blob: bytes, expiry_unix_s: float) -> bool:
    record = DHTRecord(key_id.to_bytes(), MSGPackSerializer.dumps(subkey), blob, expiry_unix_s)
    if not node.protocol.record_validator.validate(record):
        return False
    return node.protocol.storage.store(key_id, blob, expiry_unix_s, subkey=subkey)


def _other_replicas(node: DHTNode, key_id: DHTID) -> list[DHTID]:
    """The nodes that keep this key beside us, nearest first."""
    nearest = node.protocol.routing_table.get_nearest_neighbors(
        key_id, node.num_replicas, exclude=node.node_id
    )
    return [node_id for node_id, peer_id in nearest if peer_id not in node.blacklist]


def _own_entries(node: DHTNode, key_id: DHTID) -> Entries:
    held = node.protocol.storage.get(key_id)
    if held is None:
        return {}
    if isinstance(held.value, DictionaryDHTValue):
        return {subkey: _opened(entry) for subkey, entry in held.value.items()}
    return {PLAIN: _opened(held)}


def _is_replica(node: DHTNode, key_id: DHTID, others: list[DHTID]) -> bool:
    return len(others) < node.num_replicas or node.node_id ^ key_id < others[-1] ^ key_id


def _merge(held: Entries, entries: Entries) -> None:
    """What expires later wins, as everywhere in the table."""
    for subkey, entry in entries.items():
        if subkey not in held or held[subkey][1] < entry[1]:
            held[subkey] = entry


async def _ask(node: DHTNode, replica: DHTID, key_ids: list[DHTID]) -> dict[DHTID, Entries] | None:
    """One call for all keys of one replica; None when it did not answer sensibly."""
    protocol = node.protocol
    peer_id: Any = protocol.routing_table.get(node_id=replica)
    request = dht_pb2.FindRequest(keys=[key_id.to_bytes() for key_id in key_ids], peer=protocol.node_info)
    try:
        response = await protocol.get_stub(peer_id).rpc_find(request, timeout=protocol.wait_timeout)
        answer = {
            key_id: _judged(node, key_id, result)
            for key_id, result in zip(key_ids, response.results, strict=True)
        }
    except Exception:  # whatever a stranger's bytes or the library below did: no answer
        node.blacklist.register_failure(peer_id)
        await protocol.update_routing_table(replica, peer_id, responded=False)
        return None
    node.blacklist.register_success(peer_id)
    return answer


def _judged(node: DHTNode, key_id: DHTID, result: dht_pb2.FindResult) -> Entries:
    """What a replica says it keeps, without what may not be in the table."""
    if result.type == dht_pb2.FOUND_REGULAR:
        entries = {None: ValueWithExpiration(result.value, result.expiration_time)}
    elif result.type == dht_pb2.FOUND_DICTIONARY:
        dictionary = MSGPackSerializer.loads(result.value)
        with dictionary.freeze():
            entries = dict(dictionary.items())
    else:
        return {}
    may_be_kept = node.protocol.record_validator.validate
    return {
        PLAIN if subkey is None else subkey: _opened(entry)
        for subkey, entry in entries.items()
        if may_be_kept(
            DHTRecord(key_id.to_bytes(), MSGPackSerializer.dumps(subkey), entry.value, entry.expiration_time)
        )
    }


def _opened(entry: Any) -> tuple[bytes, float]:
    sealed: Any = MSGPackSerializer.loads(entry.value)
    return (sealed, entry.expiration_time)
