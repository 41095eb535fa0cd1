"""Darkroom's stages, one module each; `core` can change bytes, `harness` must not."""
