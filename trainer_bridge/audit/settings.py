"""Names of sampling settings: rows of the same name were sampled alike.

Legend: B responses.
"""

from __future__ import annotations

from keptset.schemas.rollout_batch import RolloutBatch

_OFF = {
    "top_k": ("top_k {}", 0),
    "top_p": ("top_p {:g}", 1.0),
    "min_p": ("min_p {:g}", 0.0),
    "repetition_penalty": ("repetition {:g}", 1.0),
    "frequency_penalty": ("frequency {:g}", 0.0),
    "presence_penalty": ("presence {:g}", 0.0),
}
"""Setting -> how it is shown, and what switches it off."""


def setting_names(batch: RolloutBatch) -> list[str]:
    """Every setting of each response that is not off, [B], such as "T 0.7, top_k 512, top_p 0.95"."""
    columns = [batch.column("temperature").to_pylist()]
    columns += [batch.column(name).to_pylist() for name in _OFF]
    columns.append(batch.column("logit_bias").to_pylist())
    names: dict[tuple[object, ...], str] = {}
    told = []
    for temperature, *values, bias in zip(*columns, strict=True):
        key = (temperature, *values, len(bias or ()))
        if key not in names:
            names[key] = _name(temperature, values, len(bias or ()))
        told.append(names[key])
    return told


def _name(temperature: float | None, values: list[float | None], biases: int) -> str:
    if temperature is None and all(value is None for value in values):
        return "settings not recorded"
    parts = ["T unknown" if temperature is None else f"T {temperature:g}"]
    for (name, (shown, off)), value in zip(_OFF.items(), values, strict=True):
        if value is None:
            parts.append(f"{name} unknown")
        elif value != off:
            parts.append(shown.format(value))
    if biases:
        parts.append(f"logit_bias of {biases} ids")
    return ", ".join(parts)
