"""Schemas of all bytes that leave a peer, and the code generated from them (`make proto`)."""
