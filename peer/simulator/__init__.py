"""The same PeerCore under a virtual clock: what the simulator finds is a failure of the product, reproducible by seed."""
