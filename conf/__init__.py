"""The shipped Hydra configuration, found by Hydra as ``pkg://lightning_rlhf.conf``; ``train.yaml`` comes first."""
