"""Numbers as a reader wants them; nan reads as a dash. One spelling for terminal and report."""

from __future__ import annotations

import math

NO_DATA = "-"


def ratio(value: float, decimals: int = 5) -> str:
    """A number near 1.

    >>> ratio(0.901234), ratio(float("nan"))
    ('0.90123', '-')
    """
    return NO_DATA if math.isnan(value) else f"{value:.{decimals}f}"


def share(value: float) -> str:
    """A share in percent: one decimal, exact zero and exact one as such, and never a rounded 0 for something.

    >>> share(0.4132), share(0), share(0.0001), share(0.9999), share(1)
    ('41.3%', '0%', '<0.1%', '>99.9%', '100%')
    """
    if math.isnan(value):
        return NO_DATA
    if value in (0, 1):
        return f"{value:.0%}"
    if value < 0.001:
        return "<0.1%"
    return ">99.9%" if value > 0.999 else f"{value:.1%}"


def size(value: float) -> str:
    """A number of ids, of which means have a decimal as long as that says something.

    >>> size(6.25), size(2.0), size(49152.0)
    ('6.2', '2', '49,152')
    """
    if math.isnan(value):
        return NO_DATA
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def small(value: float, *, signed: bool = False) -> str:
    """A number of which the order of magnitude matters.

    >>> small(3.14e-6), small(2e-6, signed=True), small(0.0)
    ('3.1e-06', '+2.0e-06', '0')
    """
    if math.isnan(value):
        return NO_DATA
    if value == 0:
        return "0"
    return f"{value:+.1e}" if signed else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Time a person waits.

    >>> duration(42.3), duration(137)
    ('42 s', '2 min 17 s')
    """
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def small_typeset(value: float, *, signed: bool = False) -> str:
    """`small` for a page: a power of ten written out, and a true minus sign.

    >>> small_typeset(3.14e-6), small_typeset(-2e-8, signed=True)
    ('3.1\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10⁻⁶', '−2.0\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10⁻⁸')
    """
    return typeset(small(value, signed=signed))


def typeset(text: str) -> str:
    """A number that was written with an exponent, or with a hyphen for its sign, as a page shows it.

    >>> typeset("-0.5"), typeset("-")
    ('−0.5', '-')
    """
    if text != NO_DATA:
        text = text.replace("-", "\N{MINUS SIGN}", text.startswith("-"))
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    superscript = str(int(exponent.replace("\N{MINUS SIGN}", "-"))).translate(_SUPERSCRIPT)
    return f"{mantissa}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10{superscript}"


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
