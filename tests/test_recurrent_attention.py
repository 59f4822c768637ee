"""AdditiveAttention and LuongAttention against the equations of their papers."""

import pytest
import torch

import fast_transformer as ft

MODULES = {
    "additive": lambda: ft.AdditiveAttention(5, 6, 7),
    "dot": lambda: ft.LuongAttention(6, 6),
    "general": lambda: ft.LuongAttention(5, 6, "general"),
    "concat": lambda: ft.LuongAttention(5, 6, "concat"),
}


def scores(module, query, key):
    """As the papers write them, one query and one key at a time."""
    if isinstance(module, ft.AdditiveAttention):
        return module.weight @ torch.tanh(module.query_projection.weight @ query + module.key_projection.weight @ key)
    if module.score == "dot":
        return query @ key
    if module.score == "general":
        return query @ module.key_projection.weight @ key
    inner = module.additive
    both = torch.cat([inner.query_projection.weight, inner.key_projection.weight], 1)
    return inner.weight @ torch.tanh(both @ torch.cat([query, key]))


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_the_papers_equations(name):
    module = MODULES[name]().double()
    query = torch.randn(2, 3, module.query_size, dtype=torch.float64, requires_grad=True)
    key, value = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 4, 2, dtype=torch.float64)
    padding = torch.tensor([[False, False, True, False], [True] * 4])
    for mask, full in ((None, torch.ones(2, 3, 4).bool()), (padding, ~padding[:, None].expand(2, 3, 4))):
        context, weights = module(query, key, value, mask)
        logits = torch.stack(
            [torch.stack([torch.stack([scores(module, q, k) for k in key[b]]) for q in query[b]]) for b in range(2)]
        )
        expected = (logits.exp() * full) / (logits.exp() * full).sum(-1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(context, expected @ value)
        learned = list(module.parameters())
        for loss, want in ((context, expected @ value), (weights.square(), expected.square())):
            got = torch.autograd.grad(loss.sum(), [query, *learned], retain_graph=True)
            torch.testing.assert_close(got, torch.autograd.grad(want.sum(), [query, *learned], retain_graph=True))


@pytest.mark.parametrize("name", MODULES)
def test_one_step_at_a_time_with_keys_projected_once(name):
    module = MODULES[name]()
    query, key, mask = (
        torch.randn(2, 3, module.query_size),
        torch.randn(2, 4, 6),
        torch.tensor([[False] * 4, [False, False, True, True]]),
    )
    context, weights = module(query, key, key_padding_mask=mask)
    projected = module.project_key(key)
    for i in range(3):
        step_context, step_weights = module(query[:, i], key, key_padding_mask=mask, projected_key=projected)
        assert step_context.shape == (2, 6) and step_weights.shape == (2, 4)
        torch.testing.assert_close(step_context, context[:, i])
        torch.testing.assert_close(step_weights, weights[:, i])


@pytest.mark.parametrize("name", MODULES)
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()
    module = MODULES[name]()
    query, key, mask = torch.randn(2, module.query_size), torch.randn(2, 4, 6), torch.arange(4).expand(2, 4) >= 3
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, key_padding_mask=mask), module(query, key, key_padding_mask=mask))


def test_modules_refuse_what_does_not_fit():
    module = ft.AdditiveAttention(5, 6, 7)
    query, key = torch.zeros(2, 3, 5), torch.zeros(2, 4, 6)
    for arguments, text in (
        ((query[..., :4], key), "query must have shape (batch, 5) or (batch, length, 5), got (2, 3, 4)"),
        ((query, key[0]), "key must have shape (batch, length, 6), got (4, 6)"),
        ((query, key, key[:, :3]), "value must be (B, S, Dv)"),
        ((query, key, None, torch.ones(4).bool()), "key_padding_mask must have shape (2, 4), got (4,)"),
        ((query[:, 0], key, None, torch.ones(2, 1, 4).bool()), "key_padding_mask must have shape (2, 4), got (2, 1, 4)"),
    ):
        with pytest.raises(ValueError) as info:
            module(*arguments)
        assert text in str(info.value)
    with pytest.raises(TypeError, match=r"key_padding_mask must be a bool tensor \(True = hidden\), got torch.float32"):
        module(query, key, None, torch.ones(2, 4))
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        ft.AdditiveAttention(5, 6, 0)
    with pytest.raises(ValueError, match='score must be "dot", "general" or "concat"'):
        ft.LuongAttention(5, 6, "cosine")
    with pytest.raises(ValueError, match="needs query_size and key_size to be equal, got 5 and 6"):
        ft.LuongAttention(5, 6)
