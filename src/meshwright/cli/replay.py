"""`meshwright replay`: reruns a step that was not finite, and finds where it started."""

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.errors import ExitCode


def run(arguments: Arguments, output: Output) -> int:
    """Replay a record and print what was found."""
    example = "outputs/<project>/<date>/<time>/incidents/000123"
    (path,) = arguments.words("one record", example=example)
    from meshwright.mesh.simulate import simulate_devices
    from meshwright.runtime.jax_internals import jax_has_started
    from meshwright.trainer.incidents.flight_record import read_record
    from meshwright.trainer.incidents.replay import replay

    record = read_record(path)
    if record.facts["platform"] == "cpu" and not jax_has_started():
        simulate_devices(record.plan.num_devices)
    found = replay(record.folder)
    output.result(found.to_json(), text=str(found))
    return ExitCode.DONE if found.reproduced else ExitCode.CHECK_FAILED
