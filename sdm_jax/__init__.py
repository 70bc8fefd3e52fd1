"""Sparse Delta Memory for JAX: a large bank of slots, written and read sparsely by a gated delta rule."""
