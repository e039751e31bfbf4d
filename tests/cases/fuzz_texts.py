"""Fuzz targets: configurations, overrides, sweeps and arms, all of them YAML."""

from __future__ import annotations

from pathlib import Path

from fuzz_mutations import any_bytes
from fuzz_target import Opened, Target

from erase_rec.api.assembly import ContentCatalog
from erase_rec.bench.arms import read_arms
from erase_rec.config.load import dump_config, load_config
from erase_rec.sweep.file import read_sweep
from erase_rec.sweep.points import plan_points

CONFIG = b"""seed: 1
data: {kind: csv, train: log.csv, label: {column: click}, params: {delimiter: tab}}
features:
  dense: [age, {name: price, transform: standardize}]
  sparse: [{name: item, encoding: vocabulary}, {name: "on", num_embeddings: 100}]
towers:
  - {name: deep, kind: mlp, loss: {kind: bce, weight: 1e-1}, params: {hidden: [16, 8], out_dim: 4}}
  - name: cross
    kind: dcn_v2
    loss: {kind: bce, target: joint}
schedule: {preset: erase}
train: {steps: 10, local_batch_size: 1e2}
"""
ANCHORED = b"""towers:
  - &first {name: deep, kind: mlp, detach: false, params: {hidden: [16, 8]}}
  - {<<: *first, name: again}
data: {kind: synthetic, params: {rows: 100}}
features: {dense: [I1]}
embedding: {dim: 4}
train: {epochs: 1}
"""
SWEEP = b"""base: base.yaml
overrides: {train.steps: 5}
arms: {a: {}, b: {schedule.preset: exact}}
grid: {optimizer.dense.lr: [1e-3, 1e-2], train.local_batch_size: [16, 32]}
seeds: [1, 2]
"""
ARMS = b"""arms:
  - {name: exact, about: All of it., losses: none, overrides: [schedule.preset=exact]}
  - {name: erase, about: Early., overrides: [schedule.preset=erase]}
"""
LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (97 + level, 97 + level, b", ".join([b"*%c" % (96 + level)] * 9)) for level in range(1, 10)
)
TOKENS = (
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b"- ",
        b": ",
        b"? ",
        b"| ",
        b"> ",
        b"&a ",
        b"*a ",
        b"<<: *a",
        b"_base_: ",
        b"_base_: x.yaml",
    ),
    *(b"!!python/object/apply:os.system [id]", b"!!binary ", b"!x ", b"%YAML 1.1\n", b"---\n", b"...\n", b"# ", b"\t"),
    *(b"null", b"~", b"yes", b"true", b".inf", b"1:30", b"2024-01-01", "性别".encode(), b"\xc2\x85", b"\xe2\x80\xa8"),
    *(b"towers", b"features", b"dense", b"sparse", b"name", b"kind", b"train", b"steps", b"params", b"hidden", b"loss"),
)
HOSTILE = (
    LAUGHS,
    b"train: " + b"[" * 3000,
    b"train: " + b"{a: " * 3000,
    b"train:\n" + b"".join(b" " * depth + b"a:\n" for depth in range(1, 500)),
    b"- " * 3000 + b"a",
    b'_base_: "a\\0b"',
    b"_base_: config.yaml",
    b"_base_: " + b"x" * 5000,
    b'data: {kind: csv, train: "a\\0b"}',
    b"run: {name: ../../escape}",
    b"a: &a [*a]",
    b"a: &a {b: *a}\n<<: *a",
    b"seed: " + b"9" * 6000,
    b"? [a, b]\n: c",
    b"? " * 2000,
)


def _config(folder: Path) -> Opened:
    path, again = folder / "config.yaml", folder / "again.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        loaded = load_config(path, catalog=ContentCatalog())
        again.write_text(dump_config(loaded.config), encoding="utf-8")
        assert load_config(again, catalog=ContentCatalog()).config == loaded.config, "it is another one once written"

    return Opened(any_bytes([CONFIG, ANCHORED], TOKENS), read, (CONFIG, ANCHORED, *HOSTILE))


def _overrides(folder: Path) -> Opened:
    path = folder / "config.yaml"
    path.write_bytes(CONFIG)
    typical = (b"train.steps=20\ntowers.deep.loss.weight=0.5", b"towers.deep={kind: fm}")

    def read(content: bytes) -> None:
        texts = content.decode(errors="surrogateescape").split("\n")
        load_config(path, texts, catalog=ContentCatalog())

    hostile = tuple(b"train.steps=" + text for text in (b"[" * 3000, b"{a: " * 3000, b"[&a [x], *a]", b"\0"))
    deep = b".".join([b"a"] * 3000) + b"=1"
    return Opened(any_bytes(typical, (*TOKENS, b"=", b".", b"\n")), read, (*typical, *hostile, deep, b"a=1\na.b=2"))


def _sweep(folder: Path) -> Opened:
    (folder / "base.yaml").write_bytes(CONFIG)
    path = folder / "sweep.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        sweep = read_sweep(path)
        points = plan_points(sweep, (), catalog=ContentCatalog())
        assert len({point.id for point in points}) == len(points), "two points of one name"

    many = b"base: base.yaml\ngrid: {" + b", ".join(b"k%d: [1, 2, 3, 4, 5, 6, 7, 8]" % key for key in range(40)) + b"}"
    trials = b"base: base.yaml\nsearch: {space: {seed: {low: 1, high: 2}}, trials: 99999999999999999999}"
    seeds = b"base: base.yaml\nseeds: [" + b", ".join(b"%d" % seed for seed in range(3000)) + b"]"
    return Opened(
        any_bytes([SWEEP], (*TOKENS, b"grid", b"list", b"search")), read, (SWEEP, LAUGHS, many, trials, seeds)
    )


def _arms(folder: Path) -> Opened:
    path = folder / "arms.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        arms = read_arms(path)
        assert arms, "no arm, and no message"

    return Opened(any_bytes([ARMS], TOKENS), read, (ARMS, *HOSTILE))


TARGETS = (
    Target("config", "configuration files; what is read is the same again after it was written", _config),
    Target("overrides", "key=value of the command line, one a line", _overrides),
    Target("sweep", "sweep files and their points", _sweep),
    Target("arms", "arms of a benchmark", _arms),
)
