"""Pure tensor functions: no Lightning, no config objects, nothing that remembers."""
