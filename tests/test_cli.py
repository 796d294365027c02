"""The command line, as a person meets it: what it prints, and the code that it ends with."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from axon import cli
from axon.observe.metrics import read_metrics

TINY = (Path(__file__).parent / "tiny.gin").read_text()

COMMANDS = ("train", "tune", "eval", "show", "generate", "profile", "bench")


@pytest.fixture(scope="module")
def environment(caches) -> dict[str, str]:
    """Of a process on one device, with caches that the module's tests share, which can import what tests/faults has."""
    mine = {"JAX_COMPILATION_CACHE_DIR": str(caches / "processes"), "COLUMNS": "200"}
    quick = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    paths = f"{Path(__file__).parent / 'faults'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return os.environ | mine | quick | {"PYTHONPATH": paths}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, with tiny.gin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.gin").write_text(TINY)
    return tmp_path


@pytest.fixture
def axon(here, environment, monkeypatch, capsys):
    """axon("train", …, devices=n) runs the command here, in this process: its exit code, and all that it printed."""
    for name in ("COLUMNS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, environment[name])
    everything = jax.devices()

    def run(*arguments: str, devices: int = 1) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["axon", *arguments])
        monkeypatch.setattr(jax, "devices", lambda *_: everything[:devices])
        monkeypatch.setattr(jax, "device_count", lambda *_: devices)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return run


@pytest.fixture
def start(here, environment):
    """start("train", …) begins the command in a process of its own; it is gone when the test is."""
    processes = []

    def begin(*arguments: str, **variables: str) -> subprocess.Popen:
        # Where a shell runs the tests in the background, children would ignore SIGINT.
        heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        command = [sys.executable, "-c", f"{heeding}; from axon.cli import main; main()", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=here, env=environment | variables, **pipes))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(what, process: subprocess.Popen, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


# ---- what goes right ----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_train_eval_generate_from_one_file(axon, here):
    code, out = axon("train", "tiny.gin", "--steps", "4")
    assert code == 0, out
    assert "step 4/4" in out
    code, out = axon("train", "tiny.gin", "--steps", "6", "--set", "Checkpoints.every=1")
    assert code == 0, out
    assert "resumed from step 4" in out
    folder = here / "runs/tiny"
    assert [step for step, _ in losses(folder)] == [1, 2, 3, 4, 5, 6]
    code, out = axon("eval", "runs/tiny", "--batches", "2")
    assert code == 0, out
    assert re.search(r"^loss \d\.\d{4} nats per token, \d\.\d{4} bits per byte, over [\d,]+ tokens$", out, re.MULTILINE)
    code, out = axon("generate", "runs/tiny", "--prompt", "abc", "--tokens", "5", "--temperature", "0")
    assert code == 0, out
    assert out.splitlines()[0].startswith("abc")


@pytest.mark.full
def test_many_prompts_have_a_line_each(axon, here):
    assert axon("train", "tiny.gin", "--steps", "1")[0] == 0
    (here / "in.txt").write_text("abc\n\n")
    many = ("--prompts", "in.txt", "--out", "out.jsonl", "--tokens", "5", "--temperature", "0", "--stop", "@@")
    code, printed = axon("generate", "runs/tiny", *many, "--repetition-penalty", "1.5")
    assert code == 0, printed
    assert [json.loads(line)["tokens"] <= 5 for line in (here / "out.jsonl").read_text().splitlines()] == [True, True]


def test_a_config_of_another_folder_names_its_run_after_itself(axon, here):
    (here / "elsewhere").mkdir()
    (here / "tiny.gin").rename(here / "elsewhere/small.gin")
    code, out = axon("train", str(here / "elsewhere/small.gin"), "--steps", "1")
    assert code == 0, out
    assert (here / "runs/small/metrics.jsonl").is_file()


def test_the_folder_is_the_command_lines_else_the_files_own(axon, here):
    own = ("--set", "Train.run_dir='its/own'")
    assert axon("train", "tiny.gin", "--steps", "1", *own)[0] == 0
    assert axon("train", "tiny.gin", "--steps", "1", *own, "--run-dir", "said")[0] == 0
    assert losses(here / "its/own") == losses(here / "said") != []


def test_trackers_come_from_the_file(axon, here):
    with (here / "tiny.gin").open("a") as file:
        file.write("Train.trackers = (@TensorBoard(),)\nTensorBoard.folder = 'curves'\n")
    code, out = axon("train", "tiny.gin", "--steps", "1")
    assert code == 0, out
    assert list((here / "runs/tiny/curves").glob("events.*"))


def test_show_prints_the_configuration_the_mesh_and_every_parameter(axon):
    code, out = axon("show", "tiny.gin", "--set", "Layout.mesh={'data': 4, 'tensor': 2}", "--set", "Layout.zero=3")
    assert code == 0, out
    line = TINY.splitlines().index("Llama.layers = 1") + 1
    assert re.search(rf"Llama\.layers = 1 +# tiny\.gin:{line}\n", out)
    assert "mesh of 8 devices" in out
    assert re.search(r"head +embed vocab +32 × 300 +data tensor +4,800", out)
    assert "totals" in out
    assert "no parameter is replicated on every device" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(axon, command):
    code, out = axon(command, "--help")
    assert code == 0
    assert f"Example: axon {command} " in out


def test_the_help_of_all_names_every_command(axon):
    code, out = axon("--help")
    assert code == 0
    assert all(re.search(rf"\b{command}\b", out) for command in COMMANDS)


# ---- a person's mistakes ------------------------------------------------------------------------------------------

MISTAKES = [
    ("nosuch", ["train", "nosuch.gin"]),
    ("there is no file 'tiny.gni'. Did you mean 'tiny.gin'", ["train", "tiny.gni"]),
    ("No such command 'trian'. Did you mean 'train'", ["trian", "tiny.gin"]),
    ("--set: .*'msh'.*Did you mean 'mesh'", ["train", "tiny.gin", "--set", "Layout.msh={'data': 1}"]),
    ("'Layuot'. Did you mean 'Layout'", ["train", "tiny.gin", "--set", "Layuot.mesh={'data': 1}"]),
    ("unknown mesh axis 'dta'. Did you mean 'data'", ["train", "tiny.gin", "--set", "Layout.mesh={'dta': 1}"]),
    ("data 64 = 64 devices, and there are 1", ["train", "tiny.gin", "--set", "Layout.mesh={'data': 64}"]),
    ("Llama.layers.*six", ["train", "tiny.gin", "--set", "Llama.layers='six'"]),
    ("Llama.layers", ["train", "tiny.gin", "--set", "Llama.layers"]),
    ("Llama.layers is 0; must be at least 1", ["train", "tiny.gin", "--set", "Llama.layers=0"]),
    ("AdamW.schedule", ["train", "tiny.gin", "--set", "AdamW.schedule=3"]),
    ("steps", ["train", "tiny.gin", "--steps", "-3"]),
    ("steps", ["train", "tiny.gin", "--steps", "many"]),
    ("--profile is '14'; expected .*--profile 50:53", ["train", "tiny.gin", "--profile", "14"]),
    ("--profile 9:7 has no steps.*--profile 7:9", ["train", "tiny.gin", "--profile", "9:7"]),
    ("--profile 9:999: this run ends at step 600", ["train", "tiny.gin", "--profile=9:999"]),
    ("more than Train.steps, 600", ["profile", "tiny.gin", "--steps", "599"]),
    ("leave out --set, --plan, --steps and --to", ["profile", ".", "--steps", "2"]),
    ("no config.gin", ["profile", "."]),
    ("NOPE", ["train", "tiny.gin", "--set", "Llama.layers=%NOPE"]),
    ("REQUIRED", ["train", "tiny.gin", "--set", "Llama.layers=%REQUIRED"]),
    ("vocab is 299, and the tokenizer has 300", ["train", "tiny.gin", "--set", "Llama.vocab=299"]),
    ("'heads': 'tensor', 'head_dim'|twice", ["show", "tiny.gin", "--set", "Layout.rows={'head_dim': 'tensor'}"]),
    ("no folder nosuch", ["generate", "nosuch", "--prompt", "x"]),
    ("no config.gin", ["eval", "."]),
    ("give one of --prompt TEXT and --prompts FILE", ["generate", "runs/tiny"]),
    ("give one of --prompt TEXT and --prompts FILE", ["generate", "x", "--prompt", "y", "--prompts", "in.txt"]),
    ("--out is for --prompts", ["generate", "x", "--prompt", "y", "--out", "out.jsonl"]),
    ("repetition_penalty is 0.0", ["generate", "x", "--prompt", "y", "--repetition-penalty", "0"]),
    ("no file or folder .*nosuch.jsonl", ["generate", "x", "--prompts", "nosuch.jsonl"]),
    ("top_p is 2.0", ["generate", "runs/tiny", "--prompt", "x", "--top-p", "2"]),
    ("min_p is -0.5", ["generate", "runs/tiny", "--prompt", "x", "--min-p", "-0.5"]),
    (
        "cannot write tiny.gin: it is a file, not a folder. Give another --run-dir",
        ["train", "tiny.gin", "--run-dir", "tiny.gin"],
    ),
    ("--run-dir is ''; expected a path", ["train", "tiny.gin", "--run-dir", ""]),
    ("Train.run_dir is ''; expected a path", ["train", "tiny.gin", "--set", "Train.run_dir=''"]),
    ("seed", ["train", "tiny.gin", "--set", "Train.seed=18446744073709551616"]),
    ("Sampling.seed is 1267650600228229401496703205376", ["generate", "x", "--prompt", "y", "--seed", str(2**100)]),
    ("Sampling.tokens is 1267650600228229401496703205376", ["generate", "x", "--prompt", "y", "--tokens", str(2**100)]),
    ("Train.init_from is ''; expected a path", ["train", "tiny.gin", "--set", "Train.init_from=''"]),
    ("File name too long", ["train", "tiny.gin", "--run-dir", "x" * 300]),
    ("File name too long", ["eval", "x" * 300]),
    ("--processes", ["train", "tiny.gin", "--processes", str(10**20)]),
    ("expected s3://", ["checkpoint", "list", "http://host/run"]),
    ("File name too long", ["show", "tiny.gin", "--draw", "x" * 300 + ".png"]),
]


@pytest.mark.parametrize(("message", "arguments"), MISTAKES, ids=[" ".join(arguments) for _, arguments in MISTAKES])
def test_a_mistake_gets_one_clear_message_and_exit_code_2(axon, message, arguments):
    code, out = axon(*arguments)
    assert code == 2, out
    assert re.search(message, out), out
    assert "Traceback" not in out


@pytest.mark.parametrize("command", [["report", "{}", "--html"], ["compile", "tiny.gin", "--on", "v5e:1x1", "--text"]])
def test_no_option_that_names_an_output_overwrites_a_configuration(axon, here, command):
    code, out = axon(*(part.format(here) for part in command), "tiny.gin")
    assert code == 2, out
    assert f"{command[-1]} is 'tiny.gin'; expected the name of a file that ends in" in out
    assert (here / "tiny.gin").read_text() == TINY


@pytest.mark.parametrize("name", ["AXON_PROCESS", "AXON_PROCESSES", "AXON_COORDINATOR", "AXON_LAUNCHER"])
def test_a_wrong_variable_of_the_environment_is_named(axon, monkeypatch, name):
    right = {"AXON_PROCESS": "0", "AXON_PROCESSES": "2", "AXON_COORDINATOR": "node3:4000", "AXON_LAUNCHER": "1"}
    for variable, value in (right | {name: "nonsense"}).items():
        monkeypatch.setenv(variable, value)
    code, out = axon("train", "tiny.gin")
    assert code == 2, out
    assert out.startswith(f"axon: the environment variable {name} is 'nonsense'; expected")


UNFIT = [
    (7, "Layout.mesh={'tensor': 7}", r"layers/block/attention/out: axis 'heads' of size 4 is not divisible by 7"),
    (3, "Layout.mesh={'data': 3}", r"the batch: axis 'batch' of size 8 is not divisible by 3"),
    (1, "Layout.microbatches=3", r"8 sequences are not divisible by 3, which is Layout.microbatches = 3"),
    (2, "Layout.mesh={'pipe': 2}", "1 of a kind of layers do not divide into 2 stages"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("devices", "layout", "message"), UNFIT, ids=[layout for _, layout, _ in UNFIT])
def test_a_layout_that_does_not_fit_is_refused_before_any_work(axon, here, devices, layout, message):
    code, out = axon("train", "tiny.gin", "--steps", "1", "--set", layout, devices=devices)
    assert code == 2, out
    assert re.search(message, out), out
    assert "Traceback" not in out
    assert "tokenizer:" not in out
    assert not (here / "runs").exists()


def test_a_mesh_axis_that_nothing_uses_is_refused(axon):
    mesh = ("--set", "Layout.mesh={'data': 4, 'expert': 2}", "--set", "Layout.rows={'batch': 'data'}")
    code, out = axon("train", "tiny.gin", *mesh, devices=8)
    assert code == 2, out
    assert re.search("'expert'.*(nothing|not used|unused)", out), out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include 'missing.gin'\n", r"bad.gin:1: there is no file 'missing.gin'"),
        ("include 'bad.gin'\n", r"bad.gin:1: circular include"),
        ("include 'tiny.gin'\nLlama.layers = %NOPE\n", r"bad.gin:2: .*undefined macro %NOPE"),
        ("include 'tiny.gin'\nLlama.layers = = 3\n", r"bad.gin:2"),
        ("include 'tiny.gin'\nimport nosuch_module\n", r"bad.gin:2: there is no module 'nosuch_module'"),
        ("include 'tiny.gin'\nLlama.heads = 3\n", r"bad.gin:2: Llama: embed 32 is not divisible by heads 3"),
        ("include 'tiny.gin'\nLlama.layer = 3\nCosine.peek = 1\n", r"2 mistakes(.|\n)*'layers'(.|\n)*'peak'"),
    ],
)
def test_mistakes_in_a_file_are_told_with_their_lines(axon, here, text, message):
    (here / "bad.gin").write_text(text)
    code, out = axon("train", "bad.gin")
    assert code == 2, out
    assert re.search(message, out), out
    assert "Traceback" not in out


def test_our_own_mistakes_have_a_traceback_and_exit_code_1(axon, monkeypatch):
    monkeypatch.setattr("axon.show.show.show_config", None)
    code, out = axon("show", "tiny.gin")
    assert code == 1
    assert "Traceback" in out
    assert "'NoneType' object is not callable" in out
    assert "fault of Axon's" in out


OWN = """\
from dataclasses import dataclass

from axon.axes import einsum
from models.llama import Block as Theirs, Llama


@dataclass(frozen=True)
class Mine(Llama):
    def build(self):
        model = super().build()
        {build}
        model.layers.block.__class__ = Block
        return model


class Block(Theirs):
    def __call__(self, x, inputs, cache=None):
        x, cache, auxiliary = super().__call__(x, inputs, cache)
        {call}
        return x, cache, auxiliary
"""
PATTERN = 'x = einsum("batch seq embed, embed mlp -> batch seq", x, self.mlp.up)'
OWN_MISTAKES = [
    ("build", "model.no_such_thing", r"mine\.py:11 in build: AttributeError: 'LanguageModel' .*\n    model\.no_such"),
    ("call", PATTERN, r"mine\.py:19 in __call__: PatternError: 'mlp' in one operand of .*\n    x = einsum"),
    ("call", "x = x[:, : sequence]", r"mine\.py:19 in __call__: NameError: name 'sequence' is not defined"),
    ("call", "return x", r"Block \(mine\.py:16\), .*returned one array: a block returns \(x, cache, auxiliary\)"),
    ("build", "raise SystemExit(0)", r"mine\.py:11 in build: SystemExit: 0\n"),
    ("call", "raise SystemExit('bye')", r"mine\.py:19 in __call__: SystemExit: bye\n"),
    ("build", "raise GeneratorExit", r"mine\.py:11 in build: GeneratorExit"),
    ("build", "return 3", r"Mine\.build\(\) \(mine\.py:9\) gives a int: expected a flax\.nnx\.Module"),
]


@pytest.fixture
def own(here, monkeypatch):
    """own(build=…, call=…): a model file of a person's own with a line put into it; own.gin trains it."""

    def write(**lines: str) -> None:
        (here / "mine.py").write_text(OWN.format(**{"build": "pass", "call": "pass"} | lines))
        (here / "own.gin").write_text(TINY.replace("models.llama", "mine").replace("Llama", "Mine"))
        monkeypatch.setattr(sys, "path", list(sys.path))
        sys.modules.pop("mine", None)

    yield write
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(("where", "line", "message"), OWN_MISTAKES)
def test_a_mistake_in_a_persons_own_model_is_told_with_their_file_and_line(axon, own, where, line, message):
    own(**{where: line})
    code, out = axon("train", "own.gin", "--steps", "1")
    assert code == 2, out
    assert re.search(f"^axon: {message}", out, re.MULTILINE), out
    assert "Traceback" not in out
    assert "fault of Axon's" not in out


def test_the_traceback_of_a_persons_own_mistake_is_there_for_the_asking(axon, own, monkeypatch):
    own(build="model.no_such_thing")
    monkeypatch.setenv("AXON_TRACEBACK", "1")
    code, out = axon("train", "own.gin", "--steps", "1")
    assert code == 2, out
    assert "Traceback" in out
    assert re.search(r"^axon: mine\.py:11 in build", out, re.MULTILINE), out


# ---- interrupts ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_interrupt_while_compiling_ends_with_130_and_the_run_can_begin_again(start, here):
    deep = ("--set", "Llama.layers=32")  # so that it compiles for long after the signal
    process = start("train", "tiny.gin", *deep, "--steps", "2", JAX_COMPILATION_CACHE_DIR=str(here / "empty"))
    assert process.stdout is not None
    said = ""
    while "cross_entropy:" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130, out
    assert time.monotonic() - begun < 10
    assert out.strip() == "axon: interrupted by SIGINT"
    assert losses(here / "runs/tiny") == []


SLOW = """\
import time
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class Slow:
    name: str = "slow"
    def key(self):
        return "slow"
    def texts(self):
        Path("reading").touch()
        yield "abc " * 1000
        time.sleep(100)
"""


@pytest.mark.full
def test_an_interrupt_while_synthetic_text_is_sampled_ends_promptly_with_130(start, here):
    many = ("--set", "Synthetic.documents=1000000000", "--set", "Bpe.sample=1000000000000")
    process = start("train", "tiny.gin", *many, AXON_CACHE=str(here / "cache"))
    wait_for((here / "cache/tokenizers").exists, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]  # the text has no end
    assert (process.returncode, "Traceback" in out) == (130, False), out


@pytest.mark.full
def test_an_interrupt_while_preparing_data_ends_with_130_and_leaves_nothing_half_done(start, here):
    (here / "slow.py").write_text(SLOW)
    (here / "slow.gin").write_text("include 'tiny.gin'\nimport slow\nData.sources = (@Slow(),)\n")
    process = start("train", "slow.gin", AXON_CACHE=str(here / "cache"))
    wait_for((here / "reading").exists, process)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130, out
    assert "Traceback" not in out
    assert not (here / "runs").exists()
    assert not [path for path in (here / "cache").rglob("*") if path.name.startswith("part-")]
