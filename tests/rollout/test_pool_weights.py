"""Weights as arrays that the object store can hold."""

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="needs the package ray")

from keptset.rollout.pool.weight_sync import as_arrays  # noqa: E402
from keptset.schemas.errors import InvalidInput  # noqa: E402

VALUES = np.array([[1.0, -2.5], [0.1, 3e38]], np.float32)


def test_arrays_stay_what_they_are():
    array = VALUES.copy()
    assert as_arrays({"w": array})["w"] is array


def test_paddle_tensors_keep_their_bits_and_bfloat16_its_size():
    paddle = pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")
    tensor = paddle.to_tensor(VALUES)
    halves = tensor.astype("bfloat16")
    arrays = as_arrays({"w": tensor, "h": halves})
    np.testing.assert_array_equal(arrays["w"], VALUES)
    assert arrays["h"].nbytes == VALUES.nbytes // 2
    np.testing.assert_array_equal(
        paddle.to_tensor(arrays["h"]).astype("float32").numpy(), halves.astype("float32").numpy()
    )


def test_torch_tensors_do_too():
    torch = pytest.importorskip("torch", reason="needs the package torch")
    tensor = torch.tensor(VALUES, requires_grad=True)
    halves = tensor.to(torch.bfloat16)
    arrays = as_arrays({"w": tensor, "h": halves})
    np.testing.assert_array_equal(arrays["w"], VALUES)
    assert arrays["h"].dtype == np.uint16
    np.testing.assert_array_equal(
        (arrays["h"].astype(np.uint32) << 16).view(np.float32), halves.detach().float().numpy()
    )


def test_what_is_no_tensor_is_named():
    with pytest.raises(InvalidInput, match="weight 'w' is list; it must be a tensor or a NumPy array"):
        as_arrays({"w": [1.0]})
