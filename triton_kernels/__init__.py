"""Triton kernels; imported as fast_transformer.triton_kernels."""
