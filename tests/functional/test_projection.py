"""Means over tokens and principal components, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_rlhf.functional.projection import mean_over_tokens, principal_components


@pytest.mark.parametrize("shape", [(40, 7), (5, 30)])
def test_principal_components_are_those_of_numpys_svd(shape: tuple[int, int]) -> None:
    vectors = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 5
    found = principal_components(vectors).numpy()
    centred = vectors.numpy() - vectors.numpy().mean(0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ directions[:2].T
    expected *= np.sign(np.take_along_axis(expected, np.abs(expected).argmax(0)[None], axis=0))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose((found**2).sum(0), sizes[:2] ** 2, rtol=1e-12)


def test_a_picture_does_not_depend_on_the_sign_of_a_direction() -> None:
    vectors = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0]])
    torch.testing.assert_close(principal_components(vectors)[:, 0], vectors[:, 0].double() - 10 / 3)
    torch.testing.assert_close(principal_components(-vectors)[:, 0], vectors[:, 0].double() - 10 / 3)


def test_directions_that_do_not_exist_are_zero() -> None:
    found = principal_components(torch.tensor([[1.0], [3.0]]))
    assert found.shape == (2, 2) and found[:, 0].abs().tolist() == pytest.approx([1, 1]) and not found[:, 1].any()
    assert not principal_components(torch.ones(4, 3)).any(), "equal vectors"


def test_the_mean_leaves_out_padding() -> None:
    mask = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    values = torch.tensor([[torch.nan, 1.0, 4.0], [torch.inf, 7.0, -2.0], [1.0, 1.0, 1.0]])
    assert mean_over_tokens(values, mask).tolist() == [2.5, -2.0, 0.0]
    states = torch.stack([values, 2 * values], dim=-1)
    assert mean_over_tokens(states, mask).tolist() == [[2.5, 5.0], [-2.0, -4.0], [0.0, 0.0]]
    assert mean_over_tokens(states.bfloat16(), mask).dtype == torch.float32
    with pytest.raises(ValueError, match="differ"):
        mean_over_tokens(values, mask[:, 1:])
