"""The compilation cache: when it is used, and what is known of programs that come from it."""

import gzip
import json
import os
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quick import quick_compilation
from small_models import Residuals, square_loss, vectors

import meshwright as mw
from meshwright.compiled import disk_cache
from meshwright.compiled import disk_cache as cache
from meshwright.compiled.compile_program import compile_program
from meshwright.compiled.hlo import parse_hlo
from meshwright.errors import UserError
from meshwright.mesh.build import build_mesh
from meshwright.step import train_step

__all__ = ["quick_compilation"]

EVENTS = Counter[str]()
jax.monitoring.register_event_listener(lambda event, **_: EVENTS.update([event.split("/")[-1]]))


@pytest.fixture(autouse=True)
def _counted_from_zero(own_disk_cache):
    cache.warn_unwritable.cache_clear()
    EVENTS.clear()


@pytest.fixture
def accelerator(monkeypatch):
    """Pretend to have one; programs are still compiled for CPUs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def without_texts(monkeypatch):
    """Let programs from the cache come without a text, as they do on GPUs."""
    compiled_by, as_text = jax.stages.Lowered.compile, jax.stages.Compiled.as_text
    cached = []

    def compile_it(*args, **options):
        before = EVENTS["cache_hits"]
        compiled = compiled_by(*args, **options)
        if EVENTS["cache_hits"] > before:
            cached.append(compiled)
        return compiled

    def text(compiled):
        return None if any(compiled is each for each in cached) else as_text(compiled)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_it)
    monkeypatch.setattr(jax.stages.Compiled, "as_text", text)


def lowered(name="~layer", scale=2.0):
    def f(x):
        with jax.named_scope(name):
            return jnp.sin(x * scale).sum(0)

    sharding = NamedSharding(build_mesh({"data": 8}), P("data"))
    return jax.jit(f).lower(jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding))


def operations(text):
    """What a program does, without the lines of source files that it comes from."""
    return [
        (each.name, each.opcode, each.shape, each.operands, each.op_name)
        for computation in parse_hlo(text).computations.values()
        for each in computation.instructions
    ]


def facts(program):
    return operations(program.partitioned), operations(program.optimized), program.memory


@pytest.fixture
def by_the_compiler():
    """What the compiler says without a cache."""
    return facts(compile_program(lowered()))


@pytest.mark.parametrize("texts", ["kept", "lost", "damaged"])
def test_programs_from_the_cache_have_the_compilers_texts(
    texts, by_the_compiler, without_texts, tmp_path
):
    cache.use_disk_cache(tmp_path)
    assert facts(compile_program(lowered())) == by_the_compiler
    assert (EVENTS["cache_misses"], EVENTS["cache_hits"]) == (1, 0)
    (kept,) = (tmp_path / "texts").iterdir()
    if texts == "lost":
        kept.unlink()
    if texts == "damaged":
        kept.write_bytes(kept.read_bytes()[:-20])
    EVENTS.clear()
    assert facts(compile_program(lowered())) == by_the_compiler
    assert (EVENTS["cache_misses"], EVENTS["cache_hits"]) == (0, 1)
    recompiled = EVENTS["task_disabled_cache"]
    assert recompiled == (0 if texts == "kept" else 1)
    assert gzip.decompress(kept.read_bytes()), "what was compiled anew is kept for the next time"


def test_what_was_not_asked_for_is_compiled_when_it_is(by_the_compiler, without_texts, tmp_path):
    cache.use_disk_cache(tmp_path)
    optimized = compile_program(lowered(), partitioned=False).optimized
    assert operations(optimized) == by_the_compiler[1]
    assert facts(compile_program(lowered())) == by_the_compiler
    EVENTS.clear()
    assert facts(compile_program(lowered())) == by_the_compiler
    assert EVENTS["task_disabled_cache"] == 0


def test_texts_belong_to_a_program_its_names_and_its_options():
    def key(*args, **options):
        return disk_cache.key_of(lowered(*args), options)

    assert key() == key()
    keys = {key(), key("~other"), key("~layer", 3.0), key(xla_backend_optimization_level=0)}
    assert len(keys) == 4


def test_several_writers_and_a_full_folder(tmp_path, monkeypatch):
    cache.use_disk_cache(tmp_path)
    known = disk_cache.ProgramFacts("partitioned" * 1000, "optimized", None)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: disk_cache.keep_facts(f"key{n % 2}", known), range(40)))
    assert disk_cache.load_facts("key0") == disk_cache.load_facts("key1") == known
    assert len(list((tmp_path / "texts").iterdir())) == 2
    for name, age in {"key0": 100, "key1": 200}.items():
        os.utime(tmp_path / "texts" / f"{name}.json.gz", (age, age))
    size = (tmp_path / "texts" / "key0.json.gz").stat().st_size
    monkeypatch.setattr(disk_cache, "MAX_TEXT_BYTES", 2 * size)
    disk_cache.keep_facts("key2", known)
    assert {path.name[:4] for path in (tmp_path / "texts").iterdir()} == {"key1", "key2"}


def test_accelerators_use_the_users_cache_folder(accelerator, tmp_path):
    cache.use_disk_cache(None)
    assert cache.disk_cache() == str(tmp_path / "home" / "meshwright" / "programs")


def test_cpus_and_several_processes_use_none(monkeypatch, accelerator):
    monkeypatch.setattr(cache, "process_count", lambda: 2)
    cache.use_disk_cache(None)
    assert cache.disk_cache() is None
    monkeypatch.undo()
    cache.use_disk_cache(None)
    assert cache.disk_cache() is None


def test_jax_settings_win_over_the_default(accelerator, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    for wanted in (None, True):
        cache.use_disk_cache(wanted)
        assert cache.disk_cache() == str(tmp_path / "own")
    cache.use_disk_cache(False)
    assert cache.disk_cache() is None
    cache.use_disk_cache(None)
    assert cache.disk_cache() is None, "JAX's own switch is off"


def test_a_folder_that_cannot_be_written_to_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be kept"):
        cache.use_disk_cache(tmp_path / "file" / "programs")
    with warnings.catch_warnings(action="error"):
        cache.use_disk_cache(tmp_path / "file" / "programs")
    assert cache.disk_cache() is None


def test_texts_that_cannot_be_written_are_one_warning(by_the_compiler, tmp_path):
    cache.use_disk_cache(tmp_path)
    (tmp_path / "texts").write_text("")
    with pytest.warns(UserWarning, match="cannot be kept"):
        first = compile_program(lowered())
    with warnings.catch_warnings(action="error"):
        second = compile_program(lowered())
    assert facts(first) == facts(second) == by_the_compiler


def stages(**settings):
    return mw.Trainer(
        model=Residuals,
        loss=square_loss,
        optimizer=optax.sgd(0.1),
        mesh="pipe=2",
        devices=jax.devices()[:2],
        **settings,
    )


# Programs from the cache have the compiler's texts, which are tested above every day.
@pytest.mark.full
def test_a_trainer_with_stages_checks_and_counts_what_comes_from_the_cache(
    quick_compilation, without_texts, tmp_path, monkeypatch
):
    checked = []
    monkeypatch.setattr(train_step, "check_exchanges", lambda text, mesh: checked.append(text))
    losses, ledgers = [], []
    for number in range(2):
        trainer = stages(compilation_cache=tmp_path / "programs")
        unsaved = mw.CheckpointConfig(enabled=False)
        ran = trainer.fit(
            [vectors()], steps=1, run_dir=tmp_path / str(number), checkpoint=unsaved, progress=False
        )
        losses.append(ran.losses)
        ledger = json.loads((tmp_path / str(number) / "ledger.json").read_text())
        ledgers.append({k: v for k, v in ledger.items() if k != "compile_seconds"})
        jax.clear_caches()
    assert EVENTS["cache_hits"]
    assert EVENTS["task_disabled_cache"] == 0
    assert losses[0] == losses[1]
    assert ledgers[0] == ledgers[1]
    assert "ENTRY" in checked[0]
    assert checked[0] == checked[1]


def test_a_trainer_refuses_what_is_no_folder():
    with pytest.raises(UserError, match="compilation_cache"):
        stages(compilation_cache=3)
