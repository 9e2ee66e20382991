"""One checksummed file of named tensors, outside of any repository (FORMAT.md, section 12)."""
