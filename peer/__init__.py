"""The body of a peer: drivers, compute and tools around the pure core in `protocols`."""

__version__ = "0.1.0"
