"""The command `stagelight`: serve, demo, doctor, bench; ends with the right exit code.

Nothing heavy is imported before a command is known: `serve` has its worker process running a
moment after it was called, and the worker's load is what a caller waits for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app.settings import FLAGS
from engine.errors import ConfigError, ServerError

OK, BAD_MODEL, USAGE, INTERRUPTED = 0, 1, 2, 130

cli = typer.Typer(
    name="stagelight",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@cli.callback()
def stagelight(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """An OpenAI-compatible inference server for multimodal language models."""
    if version:
        from app.doctor import version_of

        typer.echo(f"stagelight {version_of('stagelight') or 'not installed'}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code (O97)."""
    raise SystemExit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; every way to fail on purpose is one line on stderr and a code."""
    command = typer.main.get_command(cli)
    try:
        code = command.main(list(arguments), prog_name="stagelight", standalone_mode=False)
    except typer.TyperException as error:
        return _end(error.format_message(), error.exit_code)
    except ConfigError as error:
        return _end(str(error), USAGE)
    except ServerError as error:
        return _end(str(error), BAD_MODEL)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else OK


def _end(message: str, code: int) -> int:
    line = " ".join(message.split())  # one line, whatever was in it
    if line:
        typer.echo(f"stagelight: {line}", err=True)
    return code


def _with_settings_as_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command one flag for each row of the settings table; it gets their texts by name."""

    def flagged(**given: Any) -> int:
        model, config = given.pop("model"), given.pop("config")
        flags = {name.replace("_", "-"): text for name, text in given.items()}
        return command(model, {**flags, "config": config})

    def parameter(name: str, place: Any) -> inspect.Parameter:
        return inspect.Parameter(
            name.replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, place],
        )

    def flag(name: str, metavar: str, text: str) -> inspect.Parameter:
        option = typer.Option(f"--{name}", metavar=metavar, help=text, show_default=False)
        return parameter(name, option)

    place = typer.Argument(metavar="[MODEL]", help="A folder. Default: glimmer.")
    parameters = [
        parameter("model", place),
        *(flag(s.name, s.kind.metavar, f"{s.meaning} Default: {s.shown_default}.") for s in FLAGS),
        flag("config", "FILE", "A TOML file with settings; docs/settings.md lists all."),
    ]
    flagged.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flagged.__annotations__ = {p.name: p.annotation for p in parameters}
    flagged.__name__, flagged.__doc__ = command.__name__, command.__doc__
    return flagged


@cli.command()
@_with_settings_as_flags
def serve(model: str | None, flags: dict[str, str | None]) -> int:
    """Serve MODEL; prints one line with the URL when it is ready.

    Each flag is also STAGELIGHT_<NAME> in the environment and a key of the --config file.
    """
    from app.config import load_settings

    config = load_settings(model, flags)

    import asyncio

    from app.serve import serve as serve_until_stopped

    return asyncio.run(serve_until_stopped(config))


@cli.command()
def demo() -> int:
    """Start a server, ask it about a bundled picture, show its health, stop it."""
    from app.demo import demonstrate

    return demonstrate()


@cli.command()
def doctor(
    *, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> int:
    """Show versions, devices and memory of this machine."""
    from app.doctor import examine

    return examine(form="json" if as_json else "text")


@cli.command()
def bench(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first it serves.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    clients: Annotated[int, typer.Option(min=1, help="Processes that send them.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Exact length of a prompt.")] = 100,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Exact length of an answer.")] = 128,
    image: Annotated[list[Path] | None, typer.Option(help="Sent in turn, one a request.")] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests that do not count.")] = 1,
    api_key_file: Annotated[Path | None, typer.Option(help="The first key is used.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here too.")] = None,
) -> int:
    """Measure any OpenAI-compatible server: times to tokens and tokens a second, as JSON."""
    from app.bench import Load, measure_and_print
    from app.config import read_api_keys

    load = Load(
        url=url,
        model=model,
        streams=streams,
        requests=requests,
        clients=clients,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        images=tuple(image or ()),
        warm_up=warm_up,
        key=read_api_keys(api_key_file)[0].value if api_key_file else None,
    )
    return measure_and_print(load, out)
