"""`axon serve`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from axon.commands.options import Weights
from axon.commands.paths import RunDir, named_paths, path


def serve(
    run_dir: RunDir,
    layout: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE",
            help="A .gin file of Layout: how to split the model over devices; by default an engine on each.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|mtp|RUN_DIR",
            help="What guesses tokens, for steps that verify several: repetitions of the text, the model's own "
            "multi-token prediction, or a smaller model. Texts stay the same.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 for all of this machine's addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    requests: Annotated[int, typer.Option(min=1, help="That run at once; others wait.")] = 64,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a request with its text; by default the model's positions.")
    ] = None,
    cache_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens whose keys and values have room.")] = None,
    cache_dtype: Annotated[str | None, typer.Option(help="Of keys and values: int8 or float8_e4m3fn.")] = None,
    weights: Weights = None,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Embed texts too, by their last token; an encoder always does.")
    ] = False,
    defaults: Annotated[
        bool, typer.Option(help="Draw as the model's generation_config.json says where a request does not.")
    ] = True,
    adapter: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=PATH",
            help="Serve the model with this adapter too, to requests that name it as their model: a folder of PEFT's, "
            "hf:NAME, or a run with LoRA. May be given several times.",
        ),
    ] = [],  # noqa: B006 - typer reads it, nothing writes it
    load_adapters: Annotated[
        bool,
        typer.Option("--load-adapters", help="Let clients load and unload adapters, from any path that they name."),
    ] = False,
    adapter_rank: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks of all adapters at once, in sum; by default those of --adapter, and 64 to load."
        ),
    ] = None,
    key: Annotated[
        list[str], typer.Option(envvar="AXON_API_KEYS", help="What clients must show; several may be valid.")
    ] = [],  # noqa: B006 - typer reads it, nothing writes it
    key_file: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="Such keys, one a line, which no list of processes shows."),
    ] = None,
) -> None:
    """Serve a trained model: OpenAI's interface at /v1, a page to chat at /, until Ctrl-C.

    Example: `axon serve runs/quickstart --port 8000`
    """
    from axon.run.beside import ServedAdapters
    from axon.run.serve_run import serve_run
    from axon.serve.capacity import Capacity
    from axon.serve.http.limits import Limits, keys_in

    tokens = max(Capacity.tokens, requests)
    capacity = Capacity(requests, tokens, length, cache_tokens=cache_tokens, cache_dtype=cache_dtype)
    keys = tuple(key) + (keys_in(key_file) if key_file else ())
    limits = Limits(keys=keys, requests=max(Limits.requests, 4 * requests))
    start = partial(serve_run, run_dir, layout, draft, capacity, limits, host, port, typer.echo)
    adapters = ServedAdapters(named_paths(adapter, "--adapter"), load_adapters, adapter_rank)
    if not start(embeddings=embeddings, weights=weights, defaults=defaults, adapters=adapters):
        raise typer.Exit(1)
