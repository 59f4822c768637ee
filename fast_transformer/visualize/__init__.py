"""Pictures of attention: weights, masks and positions (`pip install "fast-transformer-kernels[viz]"`).

with capture_attention(model) as weights:
    model(source, target)
plot_attention_grid(weights["transformer.decoder.layers.0.multihead_attn"][0], target_tokens, source_tokens, path="heads.png")
"""

from .capture import capture_attention

try:
    from .plots import plot_attention, plot_attention_grid, plot_mask, plot_positions
except ImportError as error:
    raise ImportError(f'pictures need {error.name}: pip install "fast-transformer-kernels[viz]"') from error

__all__ = ["capture_attention", "plot_attention", "plot_attention_grid", "plot_mask", "plot_positions"]
