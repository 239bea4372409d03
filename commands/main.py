"""The console command `dflare`. Subcommands import what they need when they run, so that --help answers at once."""

import argparse
import importlib
import sys

from dflare import __version__
from dflare.configuration.arguments import SECTIONS, add_flags, resolve


def build_parser() -> argparse.ArgumentParser:
    """The parser with one subcommand per section of a recipe."""
    parser = argparse.ArgumentParser(prog="dflare", description="Block-diffusion drafters for Hugging Face generate().")
    parser.add_argument("--version", action="version", version=f"dflare {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, arguments in SECTIONS.items():
        summary = str(arguments.__doc__).strip()
        command = commands.add_parser(
            name, help=summary, description=summary, allow_abbrev=False, formatter_class=argparse.HelpFormatter
        )
        add_flags(command, arguments)
    return parser


def underscored(word: str) -> str:
    """A flag with underscores, however it was typed: --dry-run is --dry_run."""
    name, sign, value = word.partition("=")
    if not name.startswith("--"):
        return word
    negation = "--no-" if name.startswith("--no-") else "--"
    return negation + name.removeprefix(negation).replace("-", "_") + sign + value


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand. A user's mistake ends in one line and status 2, a failed comparison in status 1."""
    parser = build_parser()
    namespace, extra = parser.parse_known_args([underscored(word) for word in (sys.argv[1:] if argv is None else argv)])
    command = namespace.command
    try:
        arguments = resolve(SECTIONS[command], command, namespace, extra)
        import dflare

        dflare.register()
        return importlib.import_module(f"dflare.commands.{command}").run(arguments)
    except ModuleNotFoundError as error:
        wanted = "demo" if command == "generate" else "server" if error.name == "openai" else "train"
        print(f"dflare {command}: error: {error}; in the project's folder: pip install '.[{wanted}]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"dflare {command}: error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"dflare {command}: stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        hint = "" if command == "generate" else "; the same command goes on from what was saved"
        print(f"dflare {command}: stopped{hint}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
