"""Pure tensor functions: no Lightning, no config objects, no state."""
