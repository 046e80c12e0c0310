"""Decisions of a peer: pure, deterministic, without I/O, clock, thread or hivemind."""
