"""The entry point: parses the command line, runs the command, and returns its exit code."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

from meshwright.cli.arguments import Arguments, parse_arguments
from meshwright.cli.commands import COMMANDS
from meshwright.cli.help import command_help, general_help
from meshwright.cli.output import Output, guarded_stdout, print_error, print_warnings_plainly
from meshwright.errors import (
    ExitCode,
    LostPeer,
    MeshwrightError,
    ProcessesDiffer,
    Spelling,
    explain_input,
    spelled_for,
)
from meshwright.launch.options import asks_for_help
from meshwright.runtime.activity import activity, show_activities
from meshwright.runtime.garbage import few_collections
from meshwright.runtime.heartbeat import own_heartbeat
from meshwright.runtime.interrupt import Interrupt
from meshwright.text.masking import mask_text

INTERRUPTED = 128 + 2
BROKEN_PIPE = 128 + 13
"""Exit codes of SIGINT and SIGPIPE, which are exceptions in Python."""


def entry() -> None:
    """Run the command line and exit with its code."""
    print_warnings_plainly()
    code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
        # Libraries may print while the process exits; that goes to stderr too.
        os.dup2(2, 1)
    except BrokenPipeError:
        # The reader is gone, so the rest of the output is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = BROKEN_PIPE
    if code and "meshwright.launch.connect" in sys.modules:
        from meshwright.launch.connect import leave_at_once

        leave_at_once(code)
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    # A command that saves its state before it ends handles signals from now on.
    saves = list(argv[:1]) == ["train"] and not {"--multirun", "-m", "--help", "-h"} & set(argv)
    watching = Interrupt().watch_command() if saves else nullcontext()
    with watching, spelled_for(Spelling.COMMAND_LINE):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    debug = "--debug" in argv
    try:
        if not argv or argv[0] in ("--help", "-h", "help"):
            return _print(general_help())
        if argv[0] == "--version":
            from meshwright.runtime.versions import own_version

            return _print(f"meshwright {own_version()}")
        if argv[0] == "launch":
            return _launch(argv[1:])
        arguments = parse_arguments(argv)
        if arguments.has("--help"):
            return _print(command_help(arguments.command))
        from meshwright.launch.connect import is_main

        silent = not is_main()
        shown = nullcontext() if silent else show_activities()
        with guarded_stdout(as_json=arguments.has("--json"), silent=silent) as output, shown:
            return _run(arguments, output)
    except MeshwrightError as error:
        if debug:
            _print_traceback()
        code = _fail(error)
        if isinstance(error, ProcessesDiffer):
            from meshwright.launch.connect import disconnect_processes

            # All processes are here. Those that leave without a word take the others with them.
            disconnect_processes()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except Exception as error:
        return _unexpected(error, debug=debug)


def _launch(words: Sequence[str]) -> int:
    if asks_for_help(words):
        return _print(command_help(COMMANDS["launch"]))
    from meshwright.cli.launch import launch

    return launch(words)


def _print(text: str) -> int:
    print(text)
    return ExitCode.DONE


def _run(arguments: Arguments, output: Output) -> int:
    if not arguments.command.composes:
        module = importlib.import_module(arguments.command.module)
        return _disconnected(int(module.run(arguments, output)))
    if arguments.has("--multirun"):
        from meshwright.cli.multirun import run_sweep

        return run_sweep(arguments, output)
    from meshwright.cli.request import keep_programs, make_request

    if arguments.has("--cfg"):
        from meshwright.cli.config import print_composed

        return print_composed(arguments, output)
    waiting = activity("starting JAX") if arguments.command.needs_devices else nullcontext()
    with waiting, few_collections():
        request = make_request(arguments, output)
        module = importlib.import_module(arguments.command.module)
        if arguments.command.needs_devices:
            keep_programs(request.config)
    return _disconnected(int(module.run(request)))


def _disconnected(code: int) -> int:
    """Leave the other processes after a command that has done its work."""
    if code == ExitCode.DONE:
        from meshwright.launch.connect import disconnect_processes

        disconnect_processes()
    return code


def _fail(error: MeshwrightError) -> int:
    """Report an error to the launcher, then print it; return its exit code."""
    own_heartbeat().report(error=mask_text(error.what), lost_peer=isinstance(error, LostPeer))
    if "meshwright.processes.peers" in sys.modules:
        from meshwright.processes.peers import leave_peers

        leave_peers(mask_text(error.what))
    print_error(error)
    return error.exit_code


def _print_traceback() -> None:
    print(mask_text(traceback.format_exc()), end="", file=sys.stderr)


def _unexpected(error: Exception, *, debug: bool) -> int:
    if debug:
        _print_traceback()
    if "meshwright.launch.connect" in sys.modules:
        from meshwright.launch.connect import explain_lost_peer

        lost = explain_lost_peer(error)
        if lost is not None:
            return _fail(lost)
    if "jax" in sys.modules:
        from meshwright.compiled.memory import find_shortage, tell_shortage

        if shortage := find_shortage(error):
            return _fail(tell_shortage(shortage, "running the command"))
    from meshwright.runtime.user_code import explain_users_exception

    users = explain_users_exception(error) or explain_input(error)
    if users is not None:
        return _fail(users)
    text = f"{type(error).__name__}: {mask_text(str(error))}"
    own_heartbeat().report(error=text.partition("\n")[0])
    print(f"internal error: {text}", file=sys.stderr)
    if not debug:
        print("  add --debug for the traceback, and please report it", file=sys.stderr)
    return ExitCode.INTERNAL
