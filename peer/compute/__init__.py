"""Everything that touches a parameter: one runtime, called from one thread."""
