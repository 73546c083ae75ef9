"""Device code follows its inputs: outside the command line no module chooses, names or leaves a device."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = ("rollout", "trainer_bridge")
FORBIDDEN_NAMES = {
    "set_device",
    "CPUPlace",
    "CUDAPlace",
    "CUDAPinnedPlace",
    "XPUPlace",
    "CustomPlace",
    "cuda",
    "cpu",
    "pin_memory",
}
"""Attributes and names by which Paddle and PyTorch choose a device."""
DEVICES = ("cpu", "gpu", "cuda", "xpu", "npu")


def devices_named(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of each place where code names a device; docstrings and comments may."""
    tree = ast.parse(source)
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in FORBIDDEN_NAMES:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            name = node.value.partition(":")[0]
            if name in DEVICES:
                yield node.lineno, repr(node.value)


@pytest.mark.parametrize(
    "source",
    [
        "paddle.device.set_device(x)",
        "paddle.to_tensor(a, place=paddle.CUDAPlace(0))",
        "logits.cpu()",
        "logits.cuda(1)",
        "torch.zeros(3, device='cuda:1')",
        "model.to('gpu')",
        "from paddle import CPUPlace",
    ],
)
def test_every_way_to_name_a_device_is_seen(source: str) -> None:
    assert list(devices_named(source))


@pytest.mark.parametrize(
    "source",
    [
        "paddle.to_tensor(a, place=logits.place)",
        "logits.place.is_cpu_place()",
        "'''Runs on cpu and gpu.'''",
        "x = 1  # cpu",
    ],
)
def test_following_the_input_names_none(source: str) -> None:
    assert not list(devices_named(source))


@pytest.mark.parametrize("room", ROOMS)
def test_no_device_is_named(room: str) -> None:
    named = [
        f"{path.relative_to(REPOSITORY)}:{line} names {what}"
        for path in sorted((REPOSITORY / room).rglob("*.py"))
        for line, what in devices_named(path.read_text())
    ]
    assert not named, "\n".join(named)
