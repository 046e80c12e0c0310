"""The same PeerCore under a virtual clock: what it finds is a failure of the product, reproducible by its seed."""
