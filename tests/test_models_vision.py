"""VisionTransformer: against torch.nn's encoder on patches cut out one by one, other image sizes, its limits, and learning."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import CLOSE, assert_same_parameter_gradients, randomise, slow_path

from fast_transformer.models import VisionConfig, VisionTransformer

pytestmark = pytest.mark.usefixtures("one_thread")

E, H, P, CLASSES = 8, 2, 4, 5
SIZES = {"d_model": E, "n_heads": H, "n_layers": 2, "d_ff": 12, "image_size": 12, "patch_size": P, "dropout": 0.0}


def make(**options) -> VisionTransformer:
    return randomise(VisionTransformer(CLASSES, **(SIZES | options))).double()


class Stock(nn.Module):
    """The same of torch.nn's modules, with the same names."""

    def __init__(self):
        super().__init__()
        self.class_token = nn.Parameter(torch.empty(E))
        self.patches = nn.Conv2d(3, E, P, stride=P)
        self.positions = nn.Embedding(1 + 9, E)
        layer = nn.TransformerEncoderLayer(E, H, 12, 0.0, F.gelu, layer_norm_eps=1e-6, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E, eps=1e-6), enable_nested_tensor=False)
        self.head = nn.Linear(E, CLASSES)

    def forward(self, images):
        weight = self.patches.weight.flatten(1)  # (E, 3 * P * P)
        tokens = [self.class_token.expand(len(images), E)]
        for row in range(0, 12, P):
            for column in range(0, 12, P):
                patch = images[:, :, row : row + P, column : column + P].flatten(1)
                tokens.append(patch @ weight.T + self.patches.bias)
        return self.head(self.encoder(torch.stack(tokens, dim=1) + self.positions.weight)[:, 0])


def test_equals_torch_nn_with_all_gradients():
    ours, theirs = make(), Stock().double()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(3, 3, 12, 12, dtype=torch.float64)
    with slow_path():
        got, want = ours(images), theirs(images)
    torch.testing.assert_close(got, want, **CLOSE)
    for out in (got, want):
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    assert_same_parameter_gradients(ours, theirs)
    assert all(p.grad.any() for p in ours.parameters())


def test_features_are_in_the_order_of_the_patches():
    model = make().eval()
    model.encoder.layers = nn.ModuleList()  # now no patch sees another
    model.encoder.norm = None
    images = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    before = model.features(images)
    images[:, :, 4:8, 8:12] += 1.0  # row 1, column 2
    changed = (model.features(images) != before).any(-1)
    assert before.shape == (1, 10, E) and changed[0].nonzero().flatten().tolist() == [1 + 1 * 3 + 2]


@pytest.mark.parametrize("rows, columns", [(3, 3), (6, 3), (3, 5), (1, 2), (7, 4)])
def test_positions_of_other_image_sizes_are_interpolated(rows, columns):
    """Positions that grow with the row, or with the column, do so in the other grid, from about the first to about the last."""
    model = make()
    grid = torch.arange(3.0).expand(3, 3)
    with torch.no_grad():
        model.positions.weight[1:, 0] = grid.T.flatten()
        model.positions.weight[1:, 1] = grid.flatten()
    positions = model._positions(rows, columns)
    torch.testing.assert_close(positions[0], model.positions.weight[0])
    by_row, by_column = (positions[1:, i].view(rows, columns) for i in (0, 1))
    assert (by_row - by_row[:, :1]).abs().max() < 1e-6 and (by_row.diff(dim=0) > 0).all()
    assert (by_column - by_column[:1]).abs().max() < 1e-6 and (by_column.diff(dim=1) > 0).all()
    assert abs(by_row.mean() - 1) < 1e-6 and abs(by_column.mean() - 1) < 1e-6
    assert model(torch.randn(2, 3, rows * P, columns * P, dtype=torch.float64)).shape == (2, CLASSES)


def test_interpolated_positions_learn():
    model = make()
    model(torch.randn(2, 3, 20, 8, dtype=torch.float64)).square().sum().backward()
    assert model.positions.weight.grad.abs().amin(dim=1).min() > 0


def test_no_images_give_an_empty_result():
    assert make()(torch.zeros(0, 3, 12, 12, dtype=torch.float64)).shape == (0, CLASSES)


def test_state_dict_is_complete():
    model, other = make().eval(), VisionTransformer(CLASSES, **SIZES).double().eval()
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    assert torch.equal(model(images), other(images))


def test_compiles_into_one_graph():
    model, images = make(), torch.randn(2, 3, 12, 8, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images), **CLOSE)


# DeiT-Ti and DeiT-S: Touvron et al. 2021, table 1 (5 and 22 million); ViT-B: Dosovitskiy et al. 2021, table 1 (86 million).
@pytest.mark.parametrize("name, millions", [("tiny", 5.7), ("small", 22.1), ("base", 86.6)])
def test_named_sizes(name, millions):
    with torch.device("meta"):
        model = VisionTransformer.from_config(getattr(VisionConfig, name)(1000))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


def test_config_takes_changes():
    model = VisionTransformer.from_config(VisionConfig.tiny(10, image_size=32, patch_size=8, channels=1, n_layers=1))
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 10) and len(model.encoder.layers) == 1


def test_learns_where_the_bright_patch_is():
    model = VisionTransformer(4, channels=1, **(SIZES | {"d_model": 32, "d_ff": 64, "image_size": 2 * P}))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # with 5e-3 the loss may still jump at the end
    for _ in range(200):
        labels = torch.randint(0, 4, (32,))
        bright = F.one_hot(labels, 4).view(32, 1, 2, 2).float()
        images = F.interpolate(bright, scale_factor=P) + 0.2 * torch.randn(32, 1, 2 * P, 2 * P)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert (model(images).argmax(-1) == labels).all(), loss


@pytest.mark.parametrize(
    "options, message",
    [
        ({"image_size": 10}, "image_size must be a multiple of patch_size = 4, got 10"),
        ({"patch_size": 0}, "patch_size"),
        ({"channels": 0}, "channels"),
        ({"n_classes": 0}, "n_classes"),
        ({"n_layers": 0}, "n_layers"),
        ({"d_ff": 0}, "d_ff"),
        ({"n_heads": 3}, "d_model must be divisible by nhead"),
        ({"dropout": -0.1}, "dropout"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**({"n_classes": CLASSES} | SIZES | options))


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 1, 12, 12), (2, 3, 12, 13), (2, 3, 10, 12), (2, 3, 0, 12)], ids=str)
def test_wrong_shapes(shape):
    with pytest.raises(ValueError, match=r"images must have shape \(N, 3, height, width\), .* multiples of 4, got \("):
        make()(torch.zeros(shape, dtype=torch.float64))


def test_pixels_that_are_integers():
    with pytest.raises(TypeError, match="images must have a floating-point dtype, got torch.uint8"):
        make()(torch.zeros(2, 3, 12, 12, dtype=torch.uint8))
