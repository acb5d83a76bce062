"""Devices: the layer that asks PyTorch about them, and Ascend NPUs as a Lightning accelerator."""
