import pytest
import torch

from lantrain.optim.local_steps import all_finite


@pytest.mark.parametrize("size", [1, 7, 4096, 100_003])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_wrong_value_is_found_wherever_it_stands(size, wrong):
    for place in {0, size // 2, size - 1}:
        values = torch.full((size,), -1e38)  # their sum is infinite, they are not
        assert all_finite(values)
        values[place] = wrong
        assert not all_finite(values)


def test_no_values_are_fine():
    assert all_finite(torch.empty(0))
