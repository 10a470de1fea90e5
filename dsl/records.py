"""Dataclasses whose methods are compiled when they are needed.

`dataclasses` writes the methods of a class as text and compiles it, which takes half a millisecond a class; a process that
calls a kernel from the cache folder has some 250 of them and makes a few objects of one in three. A class made here behaves
alike, but each method is compiled at its first call, and `__init__` after `LOOPED` calls, before which a loop assigns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """As `dataclasses.dataclass`, with its options frozen, eq, repr, slots and weakref_slot."""
        return _made(cls) if cls is not None else lambda cls: _made(cls, **options)


__all__ = ["dataclass"]

LOOPED = 50
KEPT = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")
"""What a field states."""


def _made(cls: type, frozen: bool = False, eq: bool = True, repr: bool = True, **slots: bool) -> type:
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # `dataclasses` would ask for the signature
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, **slots)(cls)
    own = vars(made)
    if "__init__" not in own:
        made.__init__ = _looping(made, frozen)
    for name, wanted in {"__repr__": repr, "__eq__": eq, "__hash__": eq and frozen}.items():
        if wanted and own.get(name) is None:
            setattr(made, name, _at_first_call(made, name, frozen))
    if eq and not frozen and "__hash__" not in own:
        made.__hash__ = None
    if frozen:
        made.__setattr__, made.__delattr__ = _not_assigned, _not_deleted
    return made  # type: ignore[no-any-return]


def _not_assigned(self: object, name: str, value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _not_deleted(self: object, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


# ---------------------------------------------------------------- compiled methods


def _at_first_call(owner: type, name: str, frozen: bool) -> Callable[..., Any]:
    """The method in whose place the one that is wanted comes when it is called."""

    def first(self: object, /, *given: object, **named: object) -> object:
        return _compiled(owner, name, frozen)(self, *given, **named)

    first.__name__, first.__qualname__ = name, f"{owner.__qualname__}.{name}"
    return first


def _compiled(owner: type, name: str, frozen: bool) -> Any:
    """That method, from now on the class's own: it is of another class with the same fields, for methods do not name their
    class."""
    fields = [
        (f.name, f.type, dataclasses.field(**{k: getattr(f, k) for k in KEPT}))
        for f in dataclasses.fields(owner)
    ]
    other = dataclasses.make_dataclass(
        owner.__name__,
        fields,
        namespace={
            "__doc__": owner.__doc__,  # `dataclasses` would ask for the signature
            **({"__post_init__": None} if hasattr(owner, "__post_init__") else {}),
        },
        init=name == "__init__",
        repr=name == "__repr__",
        eq=name in ("__eq__", "__hash__"),
        unsafe_hash=name == "__hash__",
        frozen=frozen and name == "__init__",  # else it would assign as others may
    )
    method = vars(other)[name]
    method.__qualname__ = f"{owner.__qualname__}.{name}"
    setattr(owner, name, method)
    return method


# ---------------------------------------------------------------- the first calls of __init__


def _looping(owner: Any, frozen: bool) -> Callable[..., None]:
    """An `__init__` that assigns in a loop, and leaves what is wrong or unusual to the compiled one."""
    left = LOOPED
    fields: tuple[Field[Any], ...] = ()
    assign = object.__setattr__

    def __init__(self: Any, /, *given: object, **named: object) -> None:
        nonlocal left, fields
        fields = fields or dataclasses.fields(owner)
        left -= 1
        values = _values(fields, given, named) if left >= 0 else None
        if values is None:
            _compiled(owner, "__init__", frozen)(self, *given, **named)
            return
        for name, value in values:
            assign(self, name, value)
        if hasattr(self, "__post_init__"):
            self.__post_init__()

    __init__.__qualname__ = f"{owner.__qualname__}.__init__"
    return __init__


def _values(
    fields: Sequence[Field[Any]], given: Sequence[object], named: Mapping[str, object]
) -> list[tuple[str, object]] | None:
    """What each field gets; None where arguments are missing, too many or unknown, or fields are keywords only."""
    wanted = [f for f in fields if f.init]
    left = wanted[len(given) :]
    known = {f.name for f in left}
    if len(given) > len(wanted) or not named.keys() <= known or any(f.kw_only for f in wanted):
        return None
    if any(f.name not in named and f.default is MISSING and f.default_factory is MISSING for f in left):
        return None
    return [*zip((f.name for f in wanted), given, strict=False), *_defaults(fields, left, named)]


def _defaults(
    fields: Sequence[Field[Any]], left: Sequence[Field[Any]], named: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Fields by name, those that are left out, and those that no argument is for."""
    for f in (*left, *(f for f in fields if not f.init)):
        if f.name in named:
            yield f.name, named[f.name]
        elif f.default_factory is not MISSING:
            yield f.name, f.default_factory()
        elif f.init:
            yield f.name, f.default
