"""The benchmarks behind `keptset bench NAME`, each against its baseline in the same process.

A benchmark is a module with a function `command`, as a subcommand is; its line in `BENCHES` is all that registers it.
"""

from __future__ import annotations

BENCHES = {
    "decode": (
        "keptset.scripts.bench_decode",
        "Tokens a second with capture on, against transformers; batching, drafting, capture's share.",
    ),
    "capture": (
        "keptset.scripts.bench_capture",
        "Kept sets and their numbers from wide logits, against sorting the vocabulary.",
    ),
    "scoring": (
        "keptset.scripts.bench_scoring",
        "Scoring from hidden states, against the full vocabulary and against padded candidates.",
    ),
    "step": (
        "keptset.scripts.bench_step",
        "What scoring, loss and diagnostics take of a training step.",
    ),
    "audit": (
        "keptset.scripts.bench_audit",
        "Kept ids a second and memory of an audit, against a plain read and a loop.",
    ),
    "audit-power": (
        "keptset.scripts.bench_audit_power",
        "What an audit finds of every kind of planted fault, and of honest rollouts.",
    ),
    "wire": (
        "keptset.scripts.bench_wire",
        "Bytes a token in memory, spool and archive, against other formats.",
    ),
}
"""Benchmark -> (module, one line of help)."""
LINE = "Measure keptset on this machine, each part against its baseline in the same run."
