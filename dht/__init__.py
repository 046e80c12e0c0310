"""What the swarm says about itself: signed records in a distributed hash table."""
