"""`keptset rollout`: a file of prompts into a spool of rollouts. Started again, it does what is missing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from keptset.rollout.config import EngineConfig
from keptset.rollout.cpu_threads import configure, usable_cores
from keptset.rollout.tokenizer import Tokenizer, stop_token_ids
from keptset.schemas.errors import InvalidInput, MissingDependency
from keptset.scripts.prompts import PromptFile
from keptset.scripts.rollout_job import Job, run
from keptset.scripts.sampling_options import sampling_params

INTERRUPTED = 130
"""The exit code that shells give a command ended by Ctrl-C."""

MODEL, SAMPLING, ENGINE, RAY = "Model and prompts", "Sampling", "Engine", "Ray"


def command(
    prompts: Annotated[Path, typer.Argument(help="JSONL or Parquet with messages, text or token_ids, and prompt_id.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The spool, a folder; what it holds already is not redone.")],
    model: Annotated[
        Path, typer.Option(help="Hugging Face folder of a Llama, Qwen2 or Qwen3 model.", rich_help_panel=MODEL)
    ],
    model_id: Annotated[
        str | None, typer.Option(help="The model's name for people; left out: the folder's.", rich_help_panel=MODEL)
    ] = None,
    weights_version: Annotated[
        int,
        typer.Option(help="Version of its weights, recorded with every token.", min=0, rich_help_panel=MODEL),
    ] = 0,
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt.", min=1, rich_help_panel=MODEL)] = 1,
    seed: Annotated[int, typer.Option(help="Base seed of all draws.", min=0, rich_help_panel=MODEL)] = 0,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column of the prompts, of whichever kind they are.", rich_help_panel=MODEL)
    ] = None,
    id_column: Annotated[str, typer.Option(help="Column of their ids.", rich_help_panel=MODEL)] = "prompt_id",
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)] = 1.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=NUMBER, added to its logit; many times.", rich_help_panel=SAMPLING)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest response.", rich_help_panel=SAMPLING)] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="No stop before so many.", rich_help_panel=SAMPLING)] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a response; many times.", rich_help_panel=SAMPLING)
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(help="Id that ends a response, beside the model's own; many times.", rich_help_panel=SAMPLING),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="The model's own ends do not end a response.", rich_help_panel=SAMPLING)
    ] = False,
    allow_token_id: Annotated[
        list[int] | None, typer.Option(help="Only these ids may be drawn; many times.", rich_help_panel=SAMPLING)
    ] = None,
    ban: Annotated[
        list[str] | None,
        typer.Option(
            help="Word that may not occur, with and without a space before; many times.", rich_help_panel=SAMPLING
        ),
    ] = None,
    top_logprobs: Annotated[
        int, typer.Option(help="Record so many of the most probable ids.", rich_help_panel=SAMPLING)
    ] = 0,
    draft_tokens: Annotated[
        int, typer.Option(help="Guess so many tokens ahead from the request's own text.", rich_help_panel=SAMPLING)
    ] = 0,
    slots: Annotated[int, typer.Option(help="Responses decoded together.", rich_help_panel=ENGINE)] = 16,
    prefill_tokens: Annotated[
        int, typer.Option(help="Prompt tokens computed beside them in a step.", rich_help_panel=ENGINE)
    ] = 512,
    max_length: Annotated[
        int | None, typer.Option(help="Longest prompt and response; the model's context.", rich_help_panel=ENGINE)
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens whose keys and values fit at once.", rich_help_panel=ENGINE)
    ] = None,
    distribution_share: Annotated[
        float, typer.Option(help="Share of responses recorded with whole distributions.", rich_help_panel=ENGINE)
    ] = 0.0,
    dtype: Annotated[
        str, typer.Option(help="Of the weights: float32, bfloat16, float16.", rich_help_panel=ENGINE)
    ] = "float32",
    actors: Annotated[
        int, typer.Option(help="Ray actors; 0: as many as this machine carries.", min=0, rich_help_panel=RAY)
    ] = 0,
    gpus_per_actor: Annotated[float, typer.Option(help="Fractions allowed.", min=0, rich_help_panel=RAY)] = 0.0,
    threads_per_actor: Annotated[
        int, typer.Option(help="0: this machine's cores, shared out; 1 on a cluster.", min=0, rich_help_panel=RAY)
    ] = 0,
    address: Annotated[
        str | None, typer.Option(help="A running cluster, such as auto; left out: this machine.", rich_help_panel=RAY)
    ] = None,
    placement: Annotated[
        str | None, typer.Option(help="PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.", rich_help_panel=RAY)
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Of an actor in a row without an answer.", rich_help_panel=RAY)] = 3,
    max_attempts: Annotated[
        int, typer.Option(help="Lost actors after which a prompt is given up.", rich_help_panel=RAY)
    ] = 3,
    turn_seconds: Annotated[
        float, typer.Option(help="How long an actor works before it hands over what ended.", rich_help_panel=RAY)
    ] = 1.0,
    turn_timeout: Annotated[
        float, typer.Option(help="Seconds after which an actor is taken for hung.", rich_help_panel=RAY)
    ] = 600.0,
    log: Annotated[Path | None, typer.Option(help="Append what happens to actors and prompts, as JSON lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Sample responses to a file of prompts into a spool.

    Started again with the same output and settings it does only what is missing. Conversations go through the model's
    chat template; columns named x_... are carried along. Ends with 1 where prompts were refused or given up.
    """
    configure()
    _require("paddle", "ray")
    if not model.is_dir():
        raise InvalidInput(f"--model {model} is no folder; name a Hugging Face folder with config.json and safetensors")
    tokenizer = _tokenizer(model)
    own_ends = () if ignore_eos else tokenizer.stop_token_ids if tokenizer is not None else stop_token_ids(model)
    params = sampling_params(
        tokenizer=tokenizer,
        stop_token_ids=sorted({*own_ends, *(stop_token_id or ())}),
        stop_strings=tuple(stop or ()),
        logit_bias=logit_bias or (),
        ban=ban or (),
        allow_token_id=allow_token_id or (),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        top_logprobs=top_logprobs,
        draft_tokens=draft_tokens,
    )
    config = EngineConfig(
        slots=slots,
        prefill_tokens=prefill_tokens,
        max_length=max_length,
        kv_tokens=kv_tokens,
        base_seed=seed,
        distribution_share=distribution_share,
    )
    count = actors or _default_actors(model, address)
    job = Job(
        file=PromptFile(prompts, prompt_column=prompt_column, id_column=id_column),
        tokenizer=tokenizer,
        params=params,
        samples=n,
        config=config,
        model=model,
        model_id=model_id or model.resolve().name,
        version=weights_version,
        dtype=dtype,
        out=out,
    )
    ray_options = {
        "actors": count,
        "gpus_per_actor": gpus_per_actor,
        "threads_per_actor": threads_per_actor or (1 if address is not None else max(1, usable_cores() // count)),
        "address": address,
        "placement": placement,
        "max_restarts": max_restarts,
        "max_attempts": max_attempts,
        "turn_seconds": turn_seconds,
        "turn_timeout_seconds": turn_timeout,
    }
    with _logged(log):
        summary = run(job, ray_options)
    print(json.dumps(asdict(summary), indent=2) if as_json else summary.text())
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)
    if summary.failed or summary.not_begun:
        raise typer.Exit(1)


def _tokenizer(model: Path) -> Tokenizer | None:
    if not (model / "tokenizer.json").is_file():
        return None
    _require("tokenizers")
    return Tokenizer.from_folder(model)


def _default_actors(model: Path, address: str | None) -> int:
    from keptset.rollout.pool import local_actors

    # What this machine carries says nothing about a cluster.
    if address is not None:
        return 1
    return local_actors(sum(file.stat().st_size for file in model.glob("*.safetensors")))


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingDependency(
            f"rollouts need {', '.join(missing)}: pip install 'keptset[cpu]', or [gpu] for a GPU build"
        )


@contextmanager
def _logged(path: Path | None) -> Iterator[None]:
    """Events of the pool into a file, for as long as the command runs."""
    if path is None:
        yield
        return
    from keptset.rollout.pool.events import LOGGER, JsonLines

    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--log {path} cannot be written: {error.strerror}") from error
    handler.setFormatter(JsonLines())
    level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        handler.close()
