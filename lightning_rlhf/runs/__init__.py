"""The life of a run around its training: its folder, going on with it, sweeps, and how its end is told."""
