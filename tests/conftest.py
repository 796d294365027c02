"""Eight CPU devices for every test, decided before jax is imported, and small things that many tests draw.

LLVM does not optimise what the tests run: programs this small take much longer to compile than to run, and XLA's own
passes are the same. `XLA_FLAGS=--xla_backend_optimization_level=3 scripts/test` has it all, as users do.

On a busy machine a device may wait for another longer than the 40 seconds after which XLA ends the process: here it is
2 minutes. What takes longer than that is devices that wait for each other: run with `-s` to see for which collectives.
"""

import fcntl
import gc
import itertools
import json
import os
import random
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_collective_call_terminate_timeout_seconds=120 "
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("AXON_TEST_SEED", str(secrets.randbits(31)))  # here, so that all of pytest's processes have it

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

gc.set_threshold(
    100_000, 20, 100
)  # tracing allocates much and leaves few cycles: 6 % less processor time in the rooms tried


DRAWN = 2
"""How many cases of a test `--full` runs, with those that run by default, of which there may be more; one at least is
drawn of the others, and another for another `AXON_TEST_DRAW`."""

TURNS = 5
"""Of the tests that have a case for `--full`, it draws one in so many by the commit, unless a mark `draws(count)` says
of how many cases it runs at any; of `extra` ones it runs all."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks a claim's wide repetitions: as `slow` what no mark `few(name=values, …)` or `some(name=values, …)` of a
    test with the second lets through, and as `full` what no `few` does; and then as `slow` what of the `full` ones is
    not drawn, see `DRAWN` and `TURNS`."""
    wide: dict[str, list[pytest.Item]] = {}
    by_default: Counter[str] = Counter()
    for item in items:
        _refuse_unordered(item)
        few, some = (_lets_through(name, item) for name in ("few", "some"))
        if some is False and not few:
            item.add_marker("slow")
        elif few is False:
            item.add_marker("full")
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow") or item.get_closest_marker("extra"):
            continue
        if item.get_closest_marker("full"):
            wide.setdefault(test, []).append(item)
        else:
            by_default[test] += 1
    for test, cases in wide.items():
        cases.sort(key=lambda item: _lot(item.nodeid))
        in_turn = max(DRAWN - by_default[test], 1) if _lot(test) % TURNS == 0 else 0
        left = next((one.args[0] for one in cases[0].iter_markers("draws")), in_turn)
        for item in cases[left:]:
            item.add_marker("slow")


def _lot(name: str) -> int:
    """What decides whether the commit draws what has this name."""
    return zlib.crc32((os.environ.get("AXON_TEST_DRAW", "") + name).encode(errors="backslashreplace"))


def _refuse_unordered(item: pytest.Item) -> None:
    """Raise for a test named by a set: its elements come in another order in each process, and so would the name."""
    drawn = item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in drawn.items():
        if isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.name:
            raise pytest.UsageError(f"{item.nodeid}: the parameter {name} is a set; give a tuple, or `ids`")


def _lets_through(mark: str, item: pytest.Item) -> bool | None:
    """Whether a mark of this name lets the item's parameters through; None: it has no such mark."""
    marks = [one.kwargs for one in item.iter_markers(mark)]
    if not marks:
        return None
    drawn = item.callspec.params  # pyright: ignore[reportAttributeAccessIssue]
    if unknown := {name for one in marks for name in one} - drawn.keys():
        raise pytest.UsageError(f"{item.nodeid}: {mark}() names {', '.join(unknown)}, its parameters are {[*drawn]}")
    return any(all(drawn[name] in values for name, values in one.items()) for one in marks)


@pytest.fixture(scope="session")
def shared_seed() -> int:
    """The seed of what tests share, from which each test's own follows; `AXON_TEST_SEED` gives it."""
    return int(os.environ["AXON_TEST_SEED"])


@pytest.fixture(autouse=True)
def seed(shared_seed: int, request: pytest.FixtureRequest) -> int:
    """Each test's own, of what it draws by `random`, too; a test that fails shows what repeats it."""
    print(f"AXON_TEST_SEED={shared_seed}")
    drawn = zlib.crc32(f"{shared_seed} {request.node.nodeid}".encode(errors="backslashreplace")) >> 1
    random.seed(drawn)
    return drawn


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def placed():
    """placed(mesh, **layout): a `Placement` on the first devices; placed() is on one."""
    import math

    import jax

    from axon.layout import Layout, Placement

    def make(mesh=None, **layout):
        mesh = mesh or {"data": 1}
        return Placement.of(Layout(mesh=mesh, **layout), jax.devices()[: math.prod(mesh.values())])

    return make


@pytest.fixture(scope="session")
def compiled():
    """compiled(placement, fn, *args): `fn(*args)`, traced and run with a layout in force."""
    import jax
    import jax.numpy as jnp

    from axon import axes

    def run(placement, fn, *args, compute=jnp.float32, reduce=jnp.float32, execution=axes.Execution()):
        scope = axes.Scope(placement, compute, reduce, execution=execution)
        with jax.set_mesh(placement.mesh), axes.activate(scope):
            return jax.block_until_ready(jax.jit(lambda *args: fn(*args))(*args))

    return run


@pytest.fixture(scope="session")
def executed():
    """executed(**fields): a `with` block in which what is traced without a scope is carried out by this `Execution`."""
    from contextlib import contextmanager

    from axon.axes import Execution, scope

    @contextmanager
    def block(**fields):
        before, scope.UNSCOPED = scope.UNSCOPED, Execution(**fields)
        try:
            yield
        finally:
            scope.UNSCOPED = before

    return block


@pytest.fixture(scope="session")
def packed_batch():
    """packed_batch(rng, rows, seq, vocab): packed documents, and padding at the end of some rows."""

    def make(rng: np.random.Generator, rows: int, seq: int, vocab: int) -> dict[str, np.ndarray]:
        starts = rng.random((rows, seq)) < 4 / seq
        starts[:, 0] = True
        documents = np.cumsum(starts, axis=1, dtype=np.int32) - 1
        index = np.arange(seq, dtype=np.int32)
        positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        real = index < rng.integers(seq // 2, 2 * seq, (rows, 1))
        return {
            "tokens": rng.integers(0, vocab, (rows, seq), dtype=np.int32),
            "targets": rng.integers(0, vocab, (rows, seq), dtype=np.int32),
            "positions": positions.astype(np.int32),
            "documents": np.where(real, documents, -1).astype(np.int32),
            "weights": real.astype(np.float32),
        }

    return make


@pytest.fixture(scope="session")
def bind():
    """bind(module, values): the module with these parameters, nested dicts of arrays, and variables of zeros unless
    they are among `values`."""
    import jax.numpy as jnp
    from flax import nnx

    from axon.nn import Param

    def bound(module, values):
        graph, _, others = nnx.split(module, Param, ...)
        zeros = {path: jnp.zeros(v.get_value().shape, v.get_value().dtype) for path, v in nnx.to_flat_state(others)}
        given = nnx.traversals.flatten_mapping(values)
        return nnx.merge(graph, nnx.traversals.unflatten_mapping(zeros | given))

    return bound


@pytest.fixture(scope="session")
def random_parameters():
    """random_parameters(module, rng): a draw for every parameter, biases and norms too, as nested dicts."""
    from flax import nnx

    from axon.nn import parameters

    def draw(module, rng: np.random.Generator):
        flat = {}
        for path, spec in parameters(module).items():
            own = [size for name, size in zip(spec.axes, spec.shape, strict=True) if name != "layers"]
            spread = 0.5 if len(own) == 1 else own[0] ** -0.5
            values = rng.normal(size=spec.shape) * spread + (path.endswith("scale"))
            flat[tuple(path.split("/"))] = values.astype(np.float32)
        return nnx.traversals.unflatten_mapping(flat)

    return draw


@pytest.fixture(scope="session")
def begun(random_parameters):
    """begun(program, rng): a state of random parameters and else of zeros, for which nothing is compiled."""
    from dataclasses import replace

    import jax

    def state(program, rng: np.random.Generator):
        places = program.abstract_state()
        zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), places)
        drawn = replace(zeros, parameters=random_parameters(program.runtime.module, rng))
        return jax.device_put(drawn, jax.tree.map(lambda a: a.sharding, places))

    return state


@pytest.fixture(scope="session")
def given():
    """given(runtime): a way to make gradients, of no objective: those that are the batch, path → array."""
    from dataclasses import dataclass

    import jax.numpy as jnp

    from axon.runtime import Runtime, nested
    from axon.train.objective import Sums

    @dataclass(frozen=True)
    class Given:
        runtime: Runtime

        def counts(self, batch):
            return {"tokens": jnp.ones(())}

        def __call__(self, state, batch, counts, frozen=()):
            gradients = {path: jnp.zeros_like(g) if path in frozen else g for path, g in batch.items()}
            return self.runtime.reshard(nested(gradients), "grads"), Sums({"loss": jnp.zeros(())})

    return Given


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    """The folder that keeps tokens and compiled programs from here on, for tests that train the same model often."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = tmp_path_factory.mktemp("caches")
    compiled = jax.config.jax_compilation_cache_dir or str(folder / "xla")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXON_CACHE", str(folder))
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        yield folder


@pytest.fixture(autouse=True)
def cached_again():
    """Each test begins with the cache of compiled programs, which a mesh of several CPU devices turns off."""
    yield
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[], Any]], Any]:
    """once(name, make): what `make()` gives, as JSON has it, made by one of pytest's processes for all."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = tmp_path_factory.getbasetemp() if alone else tmp_path_factory.getbasetemp().parent

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.json"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(make()))
        return json.loads(path.read_text())

    return made


WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")


@pytest.fixture(scope="session")
def text(tmp_path_factory, shared_seed) -> Path:
    """A folder of 40 documents of random words, of which a fraction of 0.2 holds out every fifth."""
    from axon.data.prepare import share_of

    folder, draws = tmp_path_factory.mktemp("text"), random.Random(shared_seed)
    for number in range(40):
        drawn = (" ".join(draws.choices(WORDS, k=400)) for _ in itertools.count())
        document = next(words for words in drawn if (share_of(words.encode()) < 0.2) == (number % 5 == 0))
        (folder / f"{number:02}.txt").write_text(document)
    return folder


@pytest.fixture(scope="session")
def tiny(text):
    """A run of 12 steps without a folder or a sample, for one device."""
    from axon.checkpoint import Checkpoints
    from axon.data import Bpe, Data, Folder
    from axon.run import Evaluation, Train
    from axon.train.optimizers import AdamW, Cosine
    from models.llama import Llama

    return Train(
        model=Llama(vocab=320, embed=32, layers=1, heads=4, kv_heads=4, mlp=64),
        data=Data(seq=32, batch=8, sources=(Folder(str(text)),), tokenizer=Bpe(vocab=320), held_out=0.2),
        optimizer=AdamW(Cosine(peak=1e-2, warmup=3, steps=12)),
        steps=12,
        evaluation=Evaluation(every=10, batches=3),
        checkpoints=Checkpoints(every=5),
        sample=None,
    )


@dataclass(frozen=True)
class Ran:
    """A run that was done: its tree, its folder and the lines it said."""

    train: Any
    folder: Path
    lines: list[str]

    def records(self, *names: str) -> list[list[Any]]:
        """Of each training step: step and the named numbers."""
        from axon.observe.lines import read_lines

        found = read_lines(self.folder / "metrics.jsonl")
        return [[record[name] for name in ("step", *names)] for record in found if "loss" in record]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Its events of these kinds, in order."""
        from axon.observe.lines import read_lines

        return [event for event in read_lines(self.folder / "events.jsonl") if event["kind"] in kinds]


@contextmanager
def only(count: int) -> Iterator[None]:
    """Within, JAX has but the first `count` devices."""
    import jax

    devices = jax.devices()[:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        patch.setattr(jax, "device_count", lambda *_: count)
        yield


@pytest.fixture(scope="session")
def few() -> Callable[[int], Any]:
    """few(n): a context in which JAX has but the first n devices."""
    return only


@pytest.fixture(scope="session")
def do(caches) -> Callable[..., Ran]:
    """do(train, folder, devices=1, **arguments of run): train in `folder` on the first so many devices."""
    import axon.run

    def run(train: Any, folder: Path, devices: int = 1, **arguments: Any) -> Ran:
        lines: list[str] = []
        train = replace(train, run_dir=str(folder))
        with only(devices):
            axon.run.run(train, report=lines.append, **arguments)
        return Ran(train, folder, lines)

    return run
