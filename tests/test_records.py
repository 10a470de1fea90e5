"""Dataclasses whose methods are compiled later: each behaves as the standard library's does."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import dataclass as standard
from dataclasses import field
from typing import Any

import pytest

from tileloom.dsl import records

Decorator = Callable[..., Any]


def made(dataclass: Decorator, **options: Any) -> tuple[type, type]:
    """A class and one derived from it, with every kind of field."""

    @dataclass(**options)
    class Base:
        """A base."""

        first: int
        second: str = "two"

        @property
        def both(self) -> str:
            return f"{self.first}{self.second}"

    @dataclass(**options)
    class Derived(Base):
        unseen: int = field(default=0, repr=False, compare=False)
        several: list[int] = field(default_factory=list, hash=False)
        length: int = field(init=False)
        noted: list[str] = field(init=False, default_factory=list, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.several))

    return Base, Derived


OPTIONS: list[dict[str, Any]] = [
    {"frozen": True}, {}, {"frozen": True, "eq": False}, {"frozen": True, "eq": False, "repr": False}, {"eq": False},
]  # fmt: skip
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "b"), {}),
    ((), {"first": 3}),
    ((), {"second": "x", "first": 3}),
    ((1,), {"several": [1, 2], "unseen": 5}),
    ((1, "b", 7, [4]), {}),
    ((), {}),
    ((1, "b", 7, [4], 9), {}),
    ((1,), {"first": 2}),
    ((1,), {"third": 2}),
    ((1,), {"length": 2}),
]


def outcome(work: Callable[[], Any]) -> Any:
    """What it gives, or its error in words that do not depend on who wrote the method."""
    try:
        return work()
    except (TypeError, dataclasses.FrozenInstanceError) as error:
        return type(error), str(error)


def seen(cls: type, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """All that can be seen of an object and of others beside it, as often as makes both ways of `__init__` run."""

    def facts() -> list[Any]:
        x, same, other = cls(*given, **named), cls(*given, **named), cls(8)
        return [
            vars(x),
            x.noted is not same.noted if hasattr(x, "noted") else None,
            repr(x) if cls.__repr__ is not object.__repr__ else None,
            [x == same, x == other, x != same, x == 3, x == x],
            [
                outcome(lambda: hash(x) == hash(same)),
                outcome(lambda: hash(x)) if cls.__eq__ is not object.__eq__ else 0,
            ],
            outcome(lambda: setattr(x, "first", 4)),
            outcome(lambda: delattr(x, "second")),
            outcome(lambda: setattr(x, "fourth", 4)),
            outcome(lambda: vars(dataclasses.replace(same, second="c"))),
        ]

    return [outcome(facts) for _ in range(records.LOOPED)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("derived", [False, True])
def test_objects_are_those_of_the_standard_library(options: dict[str, Any], derived: bool) -> None:
    for given, named in ARGUMENTS:
        wanted, found = (made(d, **options)[derived] for d in (standard, records.dataclass))
        assert seen(found, given, named) == seen(wanted, given, named), (given, named)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_say_what_those_of_the_standard_library_say(options: dict[str, Any]) -> None:
    for wanted, found in zip(made(standard, **options), made(records.dataclass, **options), strict=True):
        assert vars(found)["__match_args__"] == vars(wanted)["__match_args__"]
        assert [f.name for f in dataclasses.fields(found)] == [f.name for f in dataclasses.fields(wanted)]
        assert (found.__hash__ is None) == (wanted.__hash__ is None)
        found(1)
        for name in ("__init__", "__repr__", "__eq__"):
            assert getattr(found, name).__name__ == getattr(wanted, name).__name__


def test_methods_of_a_class_are_its_own() -> None:
    @records.dataclass(frozen=True)
    class Own:
        first: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    assert (Own(1) == 2, repr(Own(1)), hash(Own(1))) == (True, "own", hash((1,)))


def test_without_parentheses() -> None:
    @records.dataclass
    class Plain:
        first: int

    x = Plain(1)
    x.first = 2
    assert (x, x.__doc__) == (Plain(2), "Plain")


@records.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Slotted:
    first: int
    second: int = 2


@records.dataclass(frozen=True)
class Pickled:
    first: int
    second: tuple[int, ...] = ()


def test_slots() -> None:
    for _ in range(records.LOOPED + 2):
        x = Slotted(1)
        assert (x.first, x.second, hasattr(x, "__dict__")) == (1, 2, False)
        assert repr(x) == "Slotted(first=1, second=2)"


def test_an_object_read_back_before_any_was_made() -> None:
    content = pickle.dumps(Pickled(1, (2, 3)))
    Pickled.__init__ = records._looping(Pickled, frozen=True)  # type: ignore[method-assign]
    match pickle.loads(content):
        case Pickled(first, second):
            assert (first, second) == (1, (2, 3))
    assert pickle.loads(content) == Pickled(1, (2, 3))


def test_methods_are_compiled_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    compiled = records._compiled

    def noted(owner: type, name: str, frozen: bool) -> Any:
        names.append(name)
        return compiled(owner, name, frozen)

    monkeypatch.setattr(records, "_compiled", noted)
    _, derived = made(records.dataclass, frozen=True)
    several = [derived(i) for i in range(records.LOOPED)]
    assert names == []
    assert several[0] == derived(0)
    assert names == ["__init__", "__eq__"]
    assert several[1] != derived(0)
    assert len(names) == 2
