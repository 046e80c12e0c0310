"""The verbs of `gossamer`, a module for each group; imported only when one of its verbs is typed."""
