"""The table of commands that `meshwright --help` lists, without importing any of them."""

from dataclasses import dataclass

from meshwright.launch.flags import FLAGS as LAUNCH_FLAGS


@dataclass(frozen=True)
class Flag:
    """A flag of one command, which Hydra does not see; one without a value is a switch.

    The value `SETTINGS` is all that follow, up to the next flag.
    """

    name: str
    help: str
    value: str = ""


@dataclass(frozen=True)
class Command:
    """A command of the command line; its module in this package has ``run(request)``.

    Attributes:
        arguments: what to write after its name for a call that works as it is.
        needs_devices: whether JAX devices must be ready before it runs, if it composes a config.
        composes: whether it takes overrides of a config; if not, its function is
            ``run(arguments, output)``.
        prints_result: whether it has a result of its own, which ``--json`` prints.
    """

    name: str
    help: str
    arguments: str
    flags: tuple[Flag, ...] = ()
    usage: str = "[flags] [overrides]"
    needs_devices: bool = True
    composes: bool = True
    prints_result: bool = True

    @property
    def module(self) -> str:
        """The name of its module."""
        return f"meshwright.cli.{self.name}"

    @property
    def example(self) -> str:
        """A call that works as it is."""
        return f"meshwright {self.name} {self.arguments}"

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """Its own flags and the common ones."""
        left_out = () if self.composes else CONFIG_FLAGS
        left_out = left_out if self.prints_result else (*left_out, "--json")
        return (*self.flags, *(flag for flag in COMMON_FLAGS if flag.name not in left_out))


_SHARE = Flag("--memory-share", "share of a device's memory that a plan may use (default 0.9)", "S")

_CHECKPOINT = (
    Flag("--step", "which checkpoint (default: the newest)", "N"),
    Flag("--which", "best, with the lowest evaluation loss, or last", "NAME"),
    Flag("--ema", "the moving average of the weights (training.ema_decay)"),
)
_MODEL = (
    Flag("--model", "the run's model, if it is your own: package.module:Name", "NAME"),
    Flag("--dtype", "number format (default: that of the run or folder)", "NAME"),
    Flag("--mesh", "where to run, such as data=8 or fsdp=4,tensor=2", "SIZES"),
    Flag("--simulate", "run on N virtual CPU devices", "N"),
    *_CHECKPOINT,
)
"""Flags of commands that load a model."""

COMMON_FLAGS = (
    Flag("--json", "print the result as one JSON value on stdout"),
    Flag("--cfg", "print the composed config and stop: job, hydra or all", "PART"),
    Flag("--multirun", "one job for each combination of comma-separated values (also -m)"),
    Flag("--config-dir", "a directory of your own config groups", "DIR"),
    Flag("--config", "a saved config to run again: the config.yaml of a run folder", "FILE"),
    Flag("--debug", "show the full traceback of an error"),
    Flag("--help", "show this help (also -h)"),
)

CONFIG_FLAGS = ("--cfg", "--multirun", "--config-dir", "--config")
"""Common flags of commands that compose a config."""

COMMANDS = {
    command.name: command
    for command in (
        Command(
            "train",
            "train a model on a mesh of devices",
            "simulate=8 mesh.fsdp=4 mesh.tensor=2",
            flags=(Flag("--distributed", "stop if this is the only process"),),
        ),
        Command(
            "verify",
            "prove that a mesh trains exactly like one device",
            "simulate=8 mesh.fsdp=4 mesh.tensor=2",
            flags=(
                Flag("--steps", "steps to compare in float64 (default 5)", "N"),
                Flag("--out", "where to save the certificate (default certificate.json)", "FILE"),
            ),
        ),
        Command(
            "inspect",
            "show the mesh, what each device holds, and why",
            "simulate=8 mesh.fsdp=4 mesh.tensor=2",
            flags=(
                Flag("--svg", "also write the drawing of the mesh to FILE", "FILE"),
                Flag("--timeline", "also write when pipeline stages work to FILE, as SVG", "FILE"),
            ),
        ),
        Command(
            "plan",
            "find the fastest mesh and settings for some hardware, and say why",
            "model=gpt2_medium hardware=8xA100-40GB",
            flags=(
                Flag("--top", "how many plans to rank (default 5)", "N"),
                Flag(
                    "--compare",
                    "settings or file of another plan to compare with, written last",
                    "SETTINGS",
                ),
                Flag("--html", "also write a page with drawings to FILE", "FILE"),
                Flag("--out", "write the best plan to FILE, for train plan=FILE", "FILE"),
                Flag("--tokens", "how much to train, such as 300B, for the budget", "N"),
                Flag("--epochs", "the same in passes over the data", "N"),
                Flag("--price", "USD per device and hour (default: of your own chips)", "USD"),
                Flag("--prove", "compile the ranked plans, and compare with what was predicted"),
                _SHARE,
            ),
            needs_devices=False,
        ),
        Command(
            "ledger",
            "compile a step and compare what it sends with the minimum",
            "simulate=8 mesh.fsdp=8",
        ),
        Command(
            "rehearse",
            "compile a step for devices that are not here: memory and communication",
            "model=gpt2_tiny hardware=8xA100-40GB mesh.fsdp=8",
            flags=(
                Flag("--on", "cpu compiles for CPUs; gpu for GPUs, if one is here", "DEVICE"),
                _SHARE,
            ),
            needs_devices=False,
        ),
        Command(
            "profile",
            "profile a few steps and show where their time goes",
            "simulate=8 mesh.fsdp=4 mesh.tensor=2",
            flags=(
                Flag("--steps", "steps to profile (default 5)", "N"),
                Flag("--out", "folder of the trace and profile.json (default ./profile)", "DIR"),
                Flag("--scaling", "time steps on 1, 2, 4 … devices instead, beside predictions"),
            ),
        ),
        Command(
            "launch",
            "run a command or a script in several processes, here or on a cluster",
            "--nprocs 2 --devices-per-process 2 -- train mesh.fsdp=4",
            flags=tuple(Flag(name, flag.help, flag.value) for name, flag in LAUNCH_FLAGS.items()),
            usage="--nprocs N [flags] -- COMMAND [flags of the command] [overrides]",
            composes=False,
            prints_result=False,
        ),
        Command(
            "drill",
            "inject faults into a real run on this machine, and check that it recovers",
            "model=gpt2_tiny mesh.data=2",
            flags=(
                Flag("--nprocs", "processes of the run (default 2)", "N"),
                Flag("--devices-per-process", LAUNCH_FLAGS["--devices-per-process"].help, "N"),
                Flag("--only", "the faults to inject, such as sigkill,preempt", "NAMES"),
                Flag("--list", "list the faults, and how the run has to recover from each"),
                Flag("--steps", "steps of each run (default 8)", "N"),
                Flag("--keep", "keep the logs and run folders; those of a failure always are"),
            ),
            needs_devices=False,
        ),
        Command(
            "report",
            "write an HTML report about a run, or comparing several",
            "outputs/meshwright",
            flags=(Flag("--out", "where to write the page (default RUN/report.html)", "FILE"),),
            usage="RUN [RUN …] [flags]",
            composes=False,
        ),
        Command(
            "export",
            "write a run's parameters to a safetensors file, or a folder for transformers or PEFT",
            "outputs/meshwright/2026-01-31/12-00-00 model.safetensors",
            flags=(
                *_CHECKPOINT,
                Flag("--to", "hf writes a Hugging Face folder, peft one of adapters", "FORMAT"),
                Flag(
                    "--dtype", "number format of the folder's weights: float32, bfloat16, …", "NAME"
                ),
            ),
            usage="RUN FILE [flags], or RUN --to hf|peft FOLDER [flags]",
            composes=False,
        ),
        Command(
            "generate",
            "continue prompts with the model of a run or a Hugging Face folder",
            'outputs/meshwright/2026-01-31/12-00-00 --prompt "Once upon a time"',
            flags=(
                Flag("--prompt", "the text to continue, or the first message of --chat", "TEXT"),
                Flag("--chat", "keep a conversation, by the folder's chat template"),
                Flag("--system", "what a conversation starts with", "TEXT"),
                Flag("--file", 'continue every {"prompt": …} of a file of JSON lines', "FILE"),
                Flag("--out", "where to write those; what is written already is kept", "FILE"),
                Flag("--max-new-tokens", "the most new tokens (default 256)", "N"),
                Flag("--min-new-tokens", "new tokens before a stop token may come", "N"),
                Flag("--temperature", "0 takes the likeliest (default: the folder's, or 0)", "T"),
                Flag("--top-k", "sample from the K likeliest tokens only", "K"),
                Flag("--top-p", "sample from the likeliest tokens up to probability P", "P"),
                Flag("--min-p", "sample from tokens with P of the likeliest's probability", "P"),
                Flag("--repetition-penalty", "above 1 repeats less", "R"),
                Flag("--stop", "a text that ends the continuation", "TEXT"),
                Flag("--stop-tokens", "tokens that end it (default: the folder's, or none)", "IDS"),
                Flag("--samples", "continuations of each prompt (default 1)", "N"),
                Flag("--seed", "seed of what is drawn, with --temperature (default 0)", "N"),
                Flag("--batch-size", "rows at a time (default 64)", "N"),
                *_MODEL,
            ),
            usage='RUN|FOLDER --prompt "…" [flags]',
            composes=False,
        ),
        Command(
            "eval",
            "measure how well a model predicts the text of a file, or completes its prompts",
            "outputs/meshwright/2026-01-31/12-00-00 text.txt",
            flags=(
                Flag("--window", "tokens that the model sees at once (default: up to 1024)", "N"),
                Flag("--stride", "by how much windows move (default: half of one)", "N"),
                Flag("--rewards", "score completions of prompts instead, by these", "NAMES"),
                Flag("--field", "the field of the file with the prompt (default: prompt)", "NAME"),
                Flag("--preset", "how they are drawn: greedy, standard or liberal", "NAME"),
                Flag("--samples", "completions of each prompt (default: 1 or 8)", "N"),
                Flag("--reward-seconds", "how long a call of a reward may take (default: 10)", "S"),
                Flag("--threshold", "the least reward of a right completion (default: 1)", "X"),
                Flag("--out", "write completions and their rewards to this file", "FILE"),
                Flag("--max-new-tokens", "their most tokens (default: the run's, or 256)", "N"),
                Flag("--seed", "seed of the completions (default: 0)", "N"),
                Flag("--batch-size", "completions at a time (default: 256)", "N"),
                *_MODEL,
            ),
            usage="RUN|FOLDER FILE [flags]",
            composes=False,
        ),
        Command(
            "check",
            "check that the checkpoints of a run are what was saved",
            "outputs/meshwright/2026-01-31/12-00-00",
            usage="RUN [flags]",
            composes=False,
        ),
        Command(
            "replay",
            "rerun a step that was not finite, and find where it started",
            "outputs/meshwright/2026-01-31/12-00-00/incidents/000123",
            usage="RECORD [flags]",
            composes=False,
        ),
        Command(
            "config",
            "show every value of the config and where it comes from",
            "training.micro_batch_size=4",
            flags=(Flag("--keys", "list every key: its meaning, default and allowed values"),),
            needs_devices=False,
        ),
        Command(
            "doctor",
            "check versions, devices, processes, and communication between devices",
            "simulate=8",
        ),
    )
}
