"""Settings of the rotary position embedding, in both spellings that config.json files use."""

from __future__ import annotations

from dataclasses import dataclass

from keptset.rollout.models.json_fields import Fields

SUPPORTED_TYPES = "'default' and 'llama3'"


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Stretches long wavelengths so that a model reaches beyond the context it was first trained with."""

    factor: float
    """Divides the frequencies of the longest wavelengths."""
    low_freq_factor: float
    """Wavelengths above original_max_position_embeddings / this are fully scaled."""
    high_freq_factor: float
    """Wavelengths below original_max_position_embeddings / this stay as they are."""
    original_max_position_embeddings: int
    """Context length before scaling, in tokens."""


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """What determines the rotation of a position."""

    theta: float = 10000.0
    """Base of the geometric series of frequencies."""
    scaling: Llama3Scaling | None = None
    """None: the default type."""


def rope_settings(config: Fields) -> RopeSettings:
    """Settings from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Errors: CheckpointError for another rope type, an unknown key, or two spellings that disagree.
    """
    old = _parse(config, "rope_scaling", config.number("rope_theta", 10000.0))
    if config.get("rope_parameters") is None:
        return old
    new = _parse(config, "rope_parameters", config.number("rope_theta", 10000.0))
    if config.get("rope_scaling") is not None and old != new:
        raise config.refuse("rope_scaling", "it disagrees with rope_parameters; keep one of the two")
    if config.get("rope_theta") is not None and old.theta != new.theta:
        raise config.refuse("rope_theta", "it disagrees with rope_parameters; keep one of the two")
    return new


def _parse(config: Fields, key: str, theta: float) -> RopeSettings:
    if config.get(key) is None:
        return RopeSettings(theta=theta)
    fields = config.nested(key)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise fields.refuse("rope_type" if "rope_type" in fields else "type", f"supported are {SUPPORTED_TYPES}")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor", "only whole-head rotation (1.0) is supported")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "llama3":
        known |= set(Llama3Scaling.__dataclass_fields__)
    fields.refuse_unknown(known, f"rope type {kind!r}")
    theta = fields.number("rope_theta", theta)
    if kind == "default":
        return RopeSettings(theta=theta)
    scaling = Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.refuse("high_freq_factor", f"it must exceed low_freq_factor = {scaling.low_freq_factor}")
    return RopeSettings(theta=theta, scaling=scaling)
