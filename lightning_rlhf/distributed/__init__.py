"""Several processes: who they are, what they share, how their devices split the work, and who starts them."""
