"""Several processes: their ranks, exchange of rows and gradients, strategies, and launchers."""
