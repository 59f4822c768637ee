"""Blocks of a layer, and a layer, as one call each (csrc/blocks.h). For tensors that are `ready`."""

from ._extension import C

self_attention, feed_forward, encoder_layer = (C and getattr(C, x) for x in ("self_attention", "feed_forward", "encoder_layer"))
