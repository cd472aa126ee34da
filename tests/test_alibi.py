"""ALiBi in the model: slopes, explain.py, exports. Its numbers are in test_attention.py,
test_numbers.py and test_model.py."""

from __future__ import annotations

from functools import partial

import pytest
import test_model
import torch

import checkpoint
from core.settings import UserError
from model import alibi_slopes
from viewer.document import maps, scores, watched, weights

build = partial(test_model.build, position="alibi")


def test_the_slopes_are_the_papers() -> None:
    """Section 3: for 8 heads 1/2 to 1/256; for 12, by its code, every second one of 16 follows."""
    twelve = [*(2.0**-n for n in range(1, 9)), *(2.0 ** -(n - 0.5) for n in range(1, 5))]
    for n in (1, 2, 3, 7, 8, 12, 16, 40):
        slopes = alibi_slopes(n, torch.device("cpu"))
        assert slopes.shape == (n,) and slopes.dtype == torch.float32
        assert slopes.unique().numel() == n and 2**-8 <= slopes.min() <= slopes.max() < 1
        if n in (8, 12):
            torch.testing.assert_close(slopes, torch.tensor(twelve[:n]))


def test_a_model_has_no_positions_but_in_its_scores() -> None:
    """Without a bias a first layer could not tell the order of earlier tokens."""
    model, x = build(n_layer=1).eval(), torch.arange(10)[None]
    assert {*model.state_dict()} == {*build(n_layer=1, position="rope").state_dict()}
    swapped = x[:, [1, 0, *range(2, 10)]]
    assert not torch.allclose(model(x)[0][:, -1], model(swapped)[0][:, -1])
    half = build().bfloat16()  # whose slopes are not rounded
    torch.testing.assert_close(half(x)[0].float(), build()(x)[0], rtol=0.1, atol=0.5)


def test_the_maps_of_explain_are_of_its_scores() -> None:
    model = build(attention_backend="sdpa").eval()
    with watched(model) as calls, torch.no_grad():
        model.hidden(torch.arange(16)[None])
    assert len(calls) == model.config.n_layer
    for call in calls:
        P = weights(call)
        torch.testing.assert_close(scores(call, 16).softmax(-1), P, rtol=1e-4, atol=1e-5)
        out = torch.einsum("hij,jhd->ihd", P, call.v[0])
        torch.testing.assert_close(out, call.out[0], rtol=1e-4, atol=1e-5)
    assert all(layer["agrees"] for layer in maps(calls)["layers"])


def test_no_format_of_other_libraries_has_it(tmp_path) -> None:
    for more in ({"bias": True}, {"norm": "rms", "mlp": "swiglu", "bias": False}):
        with pytest.raises(UserError, match="position"):
            checkpoint.save_hf(build(**more), tmp_path / "out")
    assert not (tmp_path / "out").exists()
