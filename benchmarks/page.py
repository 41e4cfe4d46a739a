"""Writes the figures of benchmarks/results/ into docs/benchmarks.md, between its markers.

python benchmarks/page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.S)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))
    from chart import main as draw_chart

    draw_chart()


def filled(page: str) -> str:
    """Return the page with every marked section filled from its record."""
    return MARKED.sub(lambda found: f"{found[1]}{section(found[2])}\n{found[3]}", page)


def section(name: str) -> str:
    """Return one benchmark's figures as Markdown."""
    if not (RESULTS / f"{name}.json").exists():
        return "\nNot measured yet.\n"
    record = json.loads((RESULTS / f"{name}.json").read_text())
    targets = [f"- {what}: {found}" for what, found in record.get("targets", {}).items()]
    parts = ["\n".join(TABLES[name](record)), "\n".join(targets), circumstances(record)]
    return "\n" + "\n\n".join(filter(None, parts)) + "\n"


def circumstances(record: dict[str, Any]) -> str:
    """Return when and on what the figures were measured."""
    machine, versions = record["hardware"], record["versions"]
    if "gpu" in record:
        peak = record.get("matmul_tflops")
        speed = f" ({peak} TFLOP/s in a bf16 product)" if peak else ""
        note = f"; {versions['note']}" if "note" in versions else ""
        return (
            f"{record['date']}, one {record['gpu']}{speed}, Python {versions['python']}, "
            f"JAX {versions['jax']}, Flax {versions['flax']}{note}: `{record['command']}`"
        )
    if "compiled_for" in record:
        what = f"{record['model']}, " if "model" in record else ""
        return (
            f"{record['date']}, {what}compiled for {record['compiled_for']}, JAX "
            f"{versions['jax']}, Flax {versions['flax']}: `{record['command']}`"
        )
    return (
        f"{record['date']}, {machine['cores']} cores of {machine['cpu']} under a load of "
        f"{machine['load']}, Python {versions['python']}, JAX {versions['jax']}, "
        f"Flax {versions['flax']}: `{record['command']}`"
    )


def gpu_choice(record: dict[str, Any]) -> list[str]:
    """One row for each choice of the planner."""
    heads = ("model, memory it may take", "chosen", "ms", "the fastest that fits", "ms", "slower")
    rows = [
        [
            f"{row['model']}, {row['memory_share']:.0%}",
            *(
                text
                for plan, ms in ((row["chosen"], row["ms"]), (row["best"], row["best"]["ms"]))
                for text in (
                    f"{plan['remat']}, {plan['microbatches']} × {plan['rows']} rows",
                    f"{ms:.1f}",
                )
            ),
            f"{row['slower']:.1%}",
        ]
        for row in record["choices"]
    ]
    return table(heads, rows)


def gpu_peers(record: dict[str, Any]) -> list[str]:
    """One row for each model and side."""
    heads = ("model", "batch", "side", "speed", "ms", "peak GiB", "of the matmul peak")
    heads = (*heads, "clock, MHz", "watts", "joules per 1,000")
    sides = ("meshwright", "transformers", "torchvision", "plain_jax")
    rows = [
        [
            row["case"],
            row["batch"],
            side,
            f"{row[side][row['unit'] + '_per_second']:,} {row['unit']}/s",
            row[side]["ms"],
            row[side]["peak_gib"],
            f"{row[side]['mfu_of_peak']:.0%}",
            *(row[side].get(key, "") for key in ("sm_mhz", "watts", "joules_per_1000")),
        ]
        for row in record["rows"]
        for side in sides
        if side in row
    ]
    return table(heads, rows)


def gpu_user_models(record: dict[str, Any]) -> list[str]:
    """One row for each model with kernels, and one without."""
    heads = ("model", "`kernels`", "tokens/s", "× our model", "peak GiB", "parts by kernel")
    rows = [
        [
            row["case"],
            row["kernels"],
            f"{row['tokens_per_second']:,}",
            f"{row['ratio']:.3f}",
            row["peak_gib"],
            ", ".join(f"{count} {what}" for what, count in row["kernels_used"].items()),
        ]
        for row in record["rows"]
    ]
    return table(heads, rows)


def gpu_generate(record: dict[str, Any]) -> list[str]:
    """One row for each way to generate, and number of rows."""
    names = {
        "hand": "plain JAX, by hand",
        "ours": "our Llama 3 1B",
        "user": "a user's decoder",
        "gemma": "Gemma 3 1B",
        "static": "transformers, static cache, compiled",
        "dynamic": "transformers",
    }
    heads = ("what", "rows", "tokens/s", "ms a token", "of the limit", "first token, cold s",
             "warm ms", "peak GiB")  # fmt: skip
    rows = [
        [
            names[row["side"]],
            row["rows"],
            f"{row['tokens_per_second']:,}",
            f"{row['ms_per_token']:.2f}",
            f"{row['of_limit']:.0%}" if "of_limit" in row else "",
            row.get("first_token_cold_s", ""),
            row.get("first_token_ms", ""),
            row["peak_gib"],
        ]
        for row in record["rows"]
    ]
    return table(heads, rows)


def gpu_grpo(record: dict[str, Any]) -> list[str]:
    """One row for each side."""
    names = {
        "lora": "LoRA",
        "full": "all weights",
        "peer_lora": "LoRA, transformers and peft",
        "peer_full": "all weights, transformers",
    }
    parts = ("seconds", "rollout", "reward", "log_probs", "update")
    heads = ("what", "s an update", "rollout", "rewards", "log-probabilities", "update",
             "tokens/s", "mismatch", "peak GiB")  # fmt: skip
    rows = [
        [
            names[side],
            *(f"{row[part]:.2f}" for part in parts),
            f"{row['tokens_per_second']:,.0f}",
            row.get("mismatch", ""),
            f"{row['peak_gib']:.1f}",
        ]
        for side, row in record["sides"].items()
    ]
    return table(heads, rows)


def gpu_context_attention(record: dict[str, Any]) -> list[str]:
    """Attention and steps of one device's part, compared with one device that has the whole row."""
    count, rows = record["context"], []
    for row in record["rows"]:
        window = f", window of {row['window']:,}" if row["window"] else ""
        rows.append([
            f"attention, {row['positions']:,} positions{window}",
            f"{row['whole_row_s']:.3f}", f"{row['one_device_s']:.4f}", f"{row['over_share']:.2f}",
        ])  # fmt: skip
    whole, part = (record["steps"][name] for name in ("whole", "part"))
    rows.append([
        "a step of two blocks of Llama 3 8B", f"{whole['compute_seconds']:.3f}",
        f"{part['compute_seconds']:.4f}", f"{record['steps']['over_share']:.2f}",
    ])  # fmt: skip
    heads = ("", "whole row, s", f"one of {count} parts, s", "over its share")
    memory = [
        f"Memory of that part: {part['peak_bytes'] / 1e9:.1f} GB; "
        f"planned: {part['predicted_peak_bytes'] / 1e9:.1f} GB ({part['peak_error']:+.1%})."
    ]
    return [*table(heads, rows), "", *memory]


def gpu_longest(record: dict[str, Any]) -> list[str]:
    """The longest row of each side."""
    names = {
        "meshwright": "Meshwright",
        "compiled": "Meshwright, compiled for an H200; not run",
        "transformers": "transformers",
    }
    rows = []
    for row in record["rows"]:
        needed = row.get("peak_bytes") or row["compiled_bytes"][str(row["longest"])]
        rows.append([names[row["side"]], f"{row['longest']:,}", f"{needed / 1e9:.1f}", row["with"]])
    return table(("", "tokens of the row", "GB", "with"), rows)


def gpu_plain_loop(record: dict[str, Any]) -> list[str]:
    """One row for each model."""
    ways = ("plain", "auto", "none")
    heads = (
        "model", "plain loop ms", "`auto` ms", "`none` ms", "`auto` over plain", "over `none`",
        "GiB plain", "GiB `auto`", "MHz", "W",
    )  # fmt: skip
    rows = [
        [
            row["case"],
            *(row.get(way, {}).get("ms", "") for way in ways),
            row["over_plain"],
            row.get("over_none", ""),
            *(row[way]["peak_gib"] for way in ("plain", "auto")),
            *(row["auto"][key] for key in ("sm_mhz", "watts")),
        ]
        for row in record["rows"]
    ]
    return table(heads, rows)


def published_throughputs(record: dict[str, Any]) -> list[str]:
    """One row for each source."""
    count = dict.fromkeys(record["sources"], 0)
    for row in record["rows"]:
        count[row["source"]] += 1
    rows = [
        [name, count[name], median, record["notes"].get(name, "")]
        for name, median in record["median_by_source"].items()
    ]
    return table(("source", "runs", "median error", "note"), rows)


def gpu_losses(record: dict[str, Any]) -> list[str]:
    """How far each run is from kernels=none."""
    keys = ("largest", "mean", "mean_from_float32", "last_loss")
    rows = [
        [name, *(f"{f[key]:.5f}" if key in f else "" for key in keys)]
        for name, f in record["differences"].items()
    ]
    heads = ("`kernels`", "largest difference", "mean", "mean from float32", "last loss")
    return table(heads, rows)


def gpu_largest(record: dict[str, Any]) -> list[str]:
    """One row for each attempt."""
    heads = ("model", "batch", "settings", "tokens/s", "peak GiB")
    rows = [
        [row["model"], row["batch"], f"`{row['settings'] or 'defaults'}`"]
        + (
            [row["refused"].replace("|", "/")[:80], ""]
            if "refused" in row
            else [f"{row['tokens_per_second']:,}", row["peak_gib"]]
        )
        for row in record["rows"]
    ]
    return table(heads, rows)


def step_guard(record: dict[str, Any]) -> list[str]:
    """Our step and the one written by hand."""
    ratio = record["ratio"]
    rows = [[name, f"{ms:.1f} ms", ""] for name, ms in record["milliseconds"].items()]
    rows.append(["meshwright / by hand", f"{ratio['median']:.3f}", spread(ratio["interval"])])
    return table(("step", "median", "95%"), rows)


def soak(record: dict[str, Any]) -> list[str]:
    """What was done to the run, and what came of it."""
    faults = [[name, count] for name, count in record["faults"].items()]
    return [
        *table(("signal", "times"), faults),
        "",
        f"{record['updates']:,} steps in {record['minutes']} min, {record['launches']} launches "
        f"and {record['restarts']} restarts; goodput {record['goodput']:.0%}.",
    ]


def planner_accuracy(record: dict[str, Any]) -> list[str]:
    """The errors of what is sent over each axis, then every plan that sends anything."""
    heads = ("sent over", "plans", "median error", "worst")
    axes = [
        [name, found["plans"], *(f"{found[key]:.1%}" for key in ("median", "worst"))]
        for name, found in record["errors"].items()
    ]
    rows = [
        [
            f"{row['model']}, {row['setting']}",
            "yes" if row["exact"] else "no",
            ", ".join(f"{axis} {error:+.1%}" for axis, error in row["sent_errors"].items()),
        ]
        for row in record["rows"]
        if row["sent_errors"]
    ]
    return [*table(heads, axes), "", *table(("plan", "state and batch exact", "sent"), rows)]


def gpu_sustained(record: dict[str, Any]) -> list[str]:
    """Predicted and measured memory and time of every point."""
    rows = [
        [
            f"{row['model']}, {row['rows']} rows, remat={row['remat']}, blocks={row['blocks']}, "
            f"× {row['microbatches']}" + ("" if row["fitted"] else " (not fitted)"),
            f"{row['predicted_bytes'] / 1e9:.2f} of {row['bytes'] / 1e9:.2f} GB",
            f"{row['memory_error']:+.1%}",
            f"{row['predicted_ms']:.1f} of {row['ms']:.1f} ms",
            f"{row['time_error']:+.1%}",
        ]
        for row in record["rows"]
        if "ms" in row
    ]
    return table(("point", "memory", "error", "step", "error"), rows)


def host_overhead(record: dict[str, Any]) -> list[str]:
    """One row for each loop, then the ratios."""
    heads = ("loop", "leaves", "ms per step", "fastest block", "thread CPU time")
    loops = [
        [name, loop["leaves"]]
        + [
            f"{loop[key]:.1f}"
            for key in ("ms_per_step", "fastest_block_ms_per_step", "thread_ms_per_step")
        ]
        for name, loop in record["loops"].items()
    ]
    ratios = [
        [name, *(f"{r[key]:.3f}" for key in ("median", "of_thread_medians")), spread(r["interval"])]
        for name, r in record["ratios"].items()
    ]
    heads_of_ratios = ("ratio", "within a round", "thread CPU time", "95% interval within a round")
    return [*table(heads, loops), "", *table(heads_of_ratios, ratios)]


def memory_depth(record: dict[str, Any]) -> list[str]:
    """One row for each way to run blocks, then the arguments of each mesh."""
    kinds = [
        [f"`{k['blocks']}`", "kept" if k["keep_gathered"] else "again", k["width"]]
        + [f"{row['temp_bytes'] / 1e6:.2f} MB" for row in k["depths"]]
        + [f"{blocks:.2f}" for blocks in k["rest_in_blocks"]]
        + [f"{k['growth_of_rest']:.2f}"]
        for k in record["kinds"]
    ]
    heads = ("blocks", "gathered", "width", "temp, 4 blocks", "16 blocks")
    heads += ("remaining / block, 4", "16", "growth")
    arguments = [
        [mesh_name(a["mesh"]), f"{a['compiled_bytes']:,}", f"{a['listed_bytes']:,}"]
        for a in record["arguments"]
    ]
    return [
        *table(heads, kinds),
        "",
        *table(("mesh", "argument bytes, compiled", "listed"), arguments),
    ]


def compile_time(record: dict[str, Any]) -> list[str]:
    """One row for each mesh."""
    counts = list(next(iter(record["meshes"].values()))["seconds"])
    rows = [
        [name]
        + [f"{m['seconds'][count]:.1f} s ({m['cpu_seconds'][count]:.1f})" for count in counts]
        + [f"{m['ratio']:.2f} ({m['cpu_ratio']:.2f})"]
        for name, m in record["meshes"].items()
    ]
    return table(("mesh", *(f"{count} devices" for count in counts), "ratio"), rows)


def verify_time(record: dict[str, Any]) -> list[str]:
    """One row for each mesh."""
    rows = [
        [name]
        + [f"{c['seconds'][label]:.1f} s ({c['cpu_seconds'][label]:.1f})" for label in LABELS]
        + [f"{c['ratio']:.2f} ({c['cpu_ratio']:.2f})"]
        for name, c in record["cases"].items()
    ]
    return table(("", f"commit {record['earlier']}", "now", "ratio"), rows)


def plan_search(record: dict[str, Any]) -> list[str]:
    """One row for each model and cluster."""
    rows = [
        [
            name,
            f"{c['meshes']}",
            f"{c['search_cpu_seconds']:.1f} s",
            f"{c['seconds']:.1f} s ({c['cpu_seconds']:.1f})",
        ]
        for name, c in record["cases"].items()
    ]
    return table(("", "meshes", "search", "whole command"), rows)


def data_scale(record: dict[str, Any]) -> list[str]:
    """One row for each run, then the speed and the kills."""
    runs = {
        "without tokens in the cache": record["two processes"],
        "the same again": record["second run"],
    }
    rows = [
        [
            name,
            f"{run['seconds']:.0f} s",
            " and ".join(f"{value:,} MiB" for value in run["peak_mib"]),
            " and ".join(f"{value:,} MiB" for value in run["peak_anonymous_mib"]),
        ]
        for name, run in runs.items()
    ]
    speed, kills, both = record["speed"], record["kills"], record["two runs at once"]
    return [
        *table(("run", "time", "largest memory (VmHWM)", "without files (RssAnon)"), rows),
        "",
        f"Tokenizing: {speed['mb_per_second']} MB/s, the bare loop "
        f"{speed['bare_mb_per_second']} MB/s, ratio {speed['ratio']:.2f}. Of {kills['killed']} "
        f"killed writers, {kills['went_on_from_a_note']} left tokens to go on from; "
        f"{kills['equal']} times the result was the same. Two runs on an empty cache that started "
        f"at once both trained, and ended after {both['seconds'][0]:.0f} s and "
        f"{both['seconds'][1]:.0f} s; one of them wrote the tokens.",
    ]


def data_pipeline(record: dict[str, Any]) -> list[str]:
    """One row for each way to read."""
    heads = ("source", "time waiting", "waits of 1 ms or more", "median wait", "longest wait")
    rows = [
        [
            name,
            f"{p['wait_share']:.2%}",
            f"{p['waits_noticed']} of {record['settings']['steps']}",
            f"{p['median_wait_ms']:.2f} ms",
            f"{p['longest_wait_ms']:.1f} ms",
        ]
        for name, p in record["pipelines"].items()
    ]
    return table(heads, rows)


def trainer_overhead(record: dict[str, Any]) -> list[str]:
    """The trainer compared with its bare step, and a save compared with a synchronous one."""
    held, whole = record["save_blocks_ms"], record["synchronous_save_ms"]
    rows = [
        ["bare step", f"{record['bare_step_ms']:.1f} ms", ""],
        ["trainer / bare step", f"{record['ratio']:.3f}", f"95%: {spread(record['ratio_95'])}"],
        ["a save costs", f"{record['save_costs_ms']:.0f} ms", "of step time"],
        ["a save blocks", f"{held:.1f} ms", f"{held / whole:.1%} of a synchronous save"],
    ]
    return table(("", "median", ""), rows)


def gpu_start(record: dict[str, Any]) -> list[str]:
    """Seconds to the first step with an empty and a warm cache, and those of JAX alone."""
    rows = [
        ["empty cache", f"{record['cold']:.1f}"],
        ["warm cache", ", ".join(f"{seconds:.1f}" for seconds in record["warm"])],
        ["JAX alone", ", ".join(f"{seconds:.1f}" for seconds in record["jax_alone"])],
    ]
    return table(("", "seconds"), rows)


def checkpoint_checksums(record: dict[str, Any]) -> list[str]:
    """A save with checksums compared with one without."""
    size, alone = record["state_bytes"] / 1e6, record["sums_cpu_ms"]
    rows = [
        [name, f"{each['ms']['without']:.0f} ms", f"{each['ratio']:.3f}", spread(each["ratio_95"])]
        for name, each in record["saves"].items()
    ]
    rows.append(["processor time of the sums alone", f"{alone:.0f} ms", "", ""])
    return table((f"a save of {size:.0f} MB", "without", "with / without", "95%"), rows)


def pipeline(record: dict[str, Any]) -> list[str]:
    """One row for each schedule and number of microbatches."""
    heads = ("schedule", "microbatches", "temporary memory", "compile time", "ticks")
    heads += ("bubble, simulated", "formula")
    rows = [
        [
            f"`{name}`",
            row["microbatches"],
            f"{row['temp_bytes'] / 1e6:.1f} MB",
            f"{row['compile_cpu_s']:.1f} s",
            row["ticks"],
            f"{row['bubble']:.3f}",
            f"{row['formula']:.3f}",
        ]
        for name, found in record["schedules"].items()
        for row in found
    ]
    return table(heads, rows)


def ddp_scaling(record: dict[str, Any]) -> list[str]:
    """One row for each model and side, then the ratio."""
    heads = ("model", "side", "samples/s, 1 process", "2 processes", "efficiency", "95%")
    names = {"meshwright": "meshwright", "torch": "PyTorch DDP"}
    rows = [
        [row["case"], name]
        + [f"{speed:,.0f}" for speed in row["samples_per_second"][side]]
        + _median(row["efficiency"][side])
        for row in record["rows"]
        for side, name in names.items()
    ]
    ratios = [
        [row["case"], "meshwright / PyTorch DDP", "", "", *_median(row["ratio"])]
        for row in record["rows"]
    ]
    return table(heads, [*rows, *ratios])


def _median(figure: dict[str, Any]) -> list[str]:
    return [f"{figure['median']:.3f}", spread(figure["interval"])]


def gpu_overlap(record: dict[str, Any]) -> list[str]:
    """One row for each mesh and way to run blocks."""
    heads = ("mesh", "blocks", "sent", "of gathers", "of reductions", "overlapped in all")
    rows = [
        [mesh_name(row["mesh"]), f"`{row['blocks']}`", f"{row['sent_bytes'] / 2**20:,.0f} MiB"]
        + [share(row["overlap"].get(kind)) for kind in ("all-gather", "reduce")]
        + [share(row)]
        for row in record["rows"]
    ]
    return table(heads, rows)


def gpu_memory(record: dict[str, Any]) -> list[str]:
    """One row for each plan, and its errors."""
    # The peak is known where there was a GPU to run on.
    measured = any("peak_bytes" in row for row in record["rows"])
    heads = ("plan", "compiled", "predicted", "error", "of what is not state")
    heads += ("measured", "error") if measured else ()
    rows = [
        [row["case"]]
        + [f"{row[name] / 2**30:.2f} GiB" for name in ("total_bytes", "predicted_total_bytes")]
        + [f"{row[name]:+.1%}" for name in ("error", "rest_error")]
        + (_peak(row) if measured else [])
        for row in record["rows"]
    ]
    return table(heads, rows)


def _peak(row: dict[str, Any]) -> list[str]:
    """Return the peak of a program and its error, if it ran."""
    if "peak_bytes" not in row:
        return ["not run", ""]
    return [f"{row['peak_bytes'] / 2**30:.2f} GiB", f"{row['peak_error']:+.1%}"]


def gpu_unseen(record: dict[str, Any]) -> list[str]:
    """One row for each plan, as it was predicted before anything was compiled."""
    rows = [
        [row["case"]]
        + [f"{row[name] / 2**30:.2f} GiB" for name in ("total_bytes", "predicted_total_bytes")]
        + [f"{row['error']:+.1%}"]
        for row in record["rows"]
    ]
    return table(("plan", "compiled", "predicted", "error"), rows)


def gpu_lora(record: dict[str, Any]) -> list[str]:
    """One row for each side, and the ratios."""
    (row,) = record["rows"]
    rows = [
        [
            side,
            f"{row[side]['tokens_per_second']:,}",
            f"{row[side]['ms']:.1f} ms",
            f"{row[side]['peak_gib']:.1f} GiB",
            f"{row[side]['joules_per_1000']:.2f}",
        ]
        for side in ("full", "lora", "transformers")
    ]
    heads = ("side", "tokens/s", "step", "peak memory", "joules per 1000 tokens")
    ratios = (
        f"LoRA over the full step: {row['time_over_full']:.2f} of the time, "
        f"{row['memory_over_full']:.2f} of the memory; over transformers with "
        f"{row['transformers']['adapters']}: {row['over_peer']:.2f} of the tokens/s."
    )
    return [*table(heads, rows), "", ratios]


def share(part: dict[str, Any] | None) -> str:
    return f"{part['overlapped']:.0%}" if part else "–"


LABELS = ("earlier", "now")


def gpu_pipeline(record: dict[str, Any]) -> list[str]:
    """Return the time and memory of a stage by schedule."""
    alone = record["one_gpu"]
    lines = [
        "| | ms | × its blocks | × its share | temporary memory | compiled in |",
        "|---|---|---|---|---|---|",
        f"| one GPU, no stages | {alone['seconds'] * 1e3:.1f} | | | {alone['temp_gib']} GiB | "
        f"{alone['compile_s']} s |",
    ]
    return lines + [
        f"| `{row['schedule']}`, first of four stages | {row['seconds'] * 1e3:.1f} | "
        f"{row.get('over_its_blocks', '')} | {row['over_its_share']} | {row['temp_gib']} GiB | "
        f"{row['compile_s']} s |"
        for row in record["rows"]
    ]


TABLES = {
    "host_overhead": host_overhead,
    "memory_depth": memory_depth,
    "compile_time": compile_time,
    "data_pipeline": data_pipeline,
    "data_scale": data_scale,
    "trainer_overhead": trainer_overhead,
    "checkpoint_checksums": checkpoint_checksums,
    "pipeline": pipeline,
    "verify_time": verify_time,
    "plan_search": plan_search,
    "step_guard": step_guard,
    "soak": soak,
    "ddp_scaling": ddp_scaling,
    "planner_accuracy": planner_accuracy,
    "gpu_sustained": gpu_sustained,
    "gpu_choice": gpu_choice,
    "gpu_peers": gpu_peers,
    "gpu_user_models": gpu_user_models,
    "gpu_generate": gpu_generate,
    "gpu_grpo": gpu_grpo,
    "gpu_plain_loop": gpu_plain_loop,
    "gpu_lora": gpu_lora,
    "published_throughputs": published_throughputs,
    "gpu_losses": gpu_losses,
    "gpu_start": gpu_start,
    "gpu_trainer_overhead": trainer_overhead,
    "gpu_largest": gpu_largest,
    "gpu_longest": gpu_longest,
    "gpu_context_attention": gpu_context_attention,
    "gpu_overlap": gpu_overlap,
    "gpu_memory": gpu_memory,
    "gpu_unseen": gpu_unseen,
    "gpu_pipeline": gpu_pipeline,
}


def spread(interval: list[float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"


def mesh_name(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis}={size}" for axis, size in mesh.items())


def table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return a Markdown table; all columns but the first are aligned right."""
    heads = list(heads)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


if __name__ == "__main__":
    main()
