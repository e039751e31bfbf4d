"""The vocabulary: its order, its bounds, and texts found by hash but never taken for another."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from feature_cases import MISSING, UNSEEN, block, encode, features_config, fit, ids

from data.features.hashing import hash_texts
from data.features.vocabulary import Vocabulary

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(number: int) -> int:
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


def colliding(text: str) -> str:
    """Another text of 16 bytes with the same hash as ``text``, of 16 bytes: the sum of the words' terms is the same."""
    first, second = (int.from_bytes(text.encode()[start : start + 8], "little") for start in (0, 8))
    total = first + mixed((second + GOLDEN) & MASK)
    for number in range(10**6):
        last = f"{number:08d}".encode()
        start = ((total - mixed((int.from_bytes(last, "little") + GOLDEN) & MASK)) & MASK).to_bytes(8, "little")
        if max(start) < 128 and min(start) >= 32 and start + last != text.encode():
            return (start + last).decode()
    raise AssertionError("one in some hundreds fits")


def test_the_vocabulary_is_ordered_by_frequency_then_text() -> None:
    config = features_config({"name": "c", "encoding": "vocabulary"})
    features = fit(config, block(c=["b", "z", "a"]), block(c=["z", "", "é"]))
    assert ids(encode(features, block(c=["z", "a", "b", "é", "new", ""]))) == [2, 3, 4, 5, UNSEEN, MISSING]
    assert features.table_rows == {"c": 6}


def test_rare_categories_and_those_past_the_bound_are_unseen() -> None:
    rows = block(c=list("aaabbccd"))
    rare = fit(features_config({"name": "c", "encoding": "vocabulary", "min_count": 3}), rows)
    assert ids(encode(rare, rows)) == [2, 2, 2, *[UNSEEN] * 5]
    bound = fit(features_config({"name": "c", "encoding": "vocabulary", "num_embeddings": 2}), rows)
    assert ids(encode(bound, rows)) == [2, 2, 2, 3, 3, UNSEEN, UNSEEN, UNSEEN]


def test_every_text_is_found_at_its_place() -> None:
    texts = [f"{number:x}/" * (1 + number % 5) for number in range(5000)]
    vocabulary = Vocabulary.of(pa.array(texts, pa.large_string()))
    asked = pa.array([*texts[::-1], "new", ""], pa.large_string())
    assert vocabulary.find(asked).tolist() == [*range(4999, -1, -1), -1, -1]


@pytest.mark.parametrize("swap", [False, True])
def test_texts_that_share_a_hash_are_told_apart(swap: bool) -> None:
    known = "sixteen bytes ab"
    twin = colliding(known)
    third = colliding("another sixteen!")
    assert twin != known
    assert len(set(hash_texts(pa.array([known, twin])).tolist())) == 1
    pair = [twin, known] if swap else [known, twin]
    both = Vocabulary.of(pa.array([*pair, "other"], pa.large_string()))
    assert both.find(pa.array([known, twin, "other"], pa.large_string())).tolist() == [swap, not swap, 2]
    alone = Vocabulary.of(pa.array(["x", known], pa.large_string()))
    assert alone.find(pa.array([known, twin, third], pa.large_string())).tolist() == [1, -1, -1]


def test_the_last_hash_of_all_ends_the_search() -> None:
    """A text behind a collision at the very end of the sorted hashes must not be looked for past it."""
    texts = sorted((f"{number:016d}" for number in range(1000)), key=lambda text: hash_texts(pa.array([text]))[0])
    last = texts[-1]
    vocabulary = Vocabulary.of(pa.array(texts, pa.large_string()))
    assert vocabulary.find(pa.array([colliding(last), last], pa.large_string())).tolist() == [-1, 999]


def test_types_meet_between_training_and_evaluation() -> None:
    """Training from text, evaluation from integers: the same categories."""
    features = fit(features_config({"name": "c", "encoding": "vocabulary"}), block(c=["5", "18446744073709551615"]))
    assert ids(encode(features, block(c=pa.array([2**64 - 1, 5], pa.uint64())))) == [2, 3]


def test_an_empty_vocabulary_knows_missing_and_unseen() -> None:
    features = fit(features_config({"name": "c", "encoding": "vocabulary"}))
    encoded = encode(features, block(c=["a", ""]))
    assert ids(encoded) == [UNSEEN, MISSING]
    assert encoded.ids[0].dtype == np.int32


@pytest.mark.parametrize("num_categories", [0, 1, 2, 3, 1000, 1025])
@pytest.mark.parametrize("longest", [4, 8, 12])
def test_texts_are_found_in_vocabularies_of_any_size_and_no_others(num_categories: int, longest: int) -> None:
    """Short texts are proved equal by length and hash, others by comparison."""
    texts = [f"{number:0{longest}d}"[-1 - number % longest :] for number in range(4000)]
    categories = list(dict.fromkeys(texts))[:num_categories]
    found = Vocabulary.of(pa.array(categories, pa.large_string())).find(pa.array(texts, pa.large_string()))
    places = {text: place for place, text in enumerate(categories)}
    assert found.tolist() == [places.get(text, -1) for text in texts]
