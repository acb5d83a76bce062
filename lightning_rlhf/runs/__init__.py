"""What surrounds the training of a run: its folder, resuming, sweeps, and the messages at its end."""
