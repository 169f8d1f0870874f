"""The registry of methods: the library's own, those that a program registers, and those of installed packages."""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points, packages_distributions
from typing import Any

from tntprune.errors import UsageError, UserNote
from tntprune.methods.base import Layout, Method
from tntprune.methods.config import Config

GROUP = "tntprune.methods"  # the entry points that name modules which register a method
METHODS: dict[str, type[Config]] = {}
_MODULES: dict[type[Config], type[Method]] = {}
_PACKAGES: dict[str, str] = {}  # the package of each module that an entry point names


def register_method(config: type[Config], method: type[Method]) -> None:
    """Register a method, so that every function and every command takes it.

    A package registers its method in a module that an entry point of the group `tntprune.methods` names.

    Args:
        config: Its options, a frozen dataclass with a `method` name of its own.
        method: The module that carries them out.

    Raises:
        UsageError: the config has no name, another method has it, or one of the two is of the wrong kind.
    """
    for given, expected in ((config, Config), (method, Method)):
        if not (isinstance(given, type) and issubclass(given, expected)):
            raise UsageError(f"{given!r}: expected a subclass of tntprune.{expected.__name__}")
    name = getattr(config, "method", None)
    if not (isinstance(name, str) and name.replace("_", "").isalnum() and name == name.lower()):
        raise UsageError(f"{config.__name__}.method={name!r}: expected a name of small letters, digits and underscores")
    taken = METHODS.get(name)
    if taken is not None and _full(taken) != _full(config):  # the same one again is a module or a cell that ran twice
        raise UsageError(f"method {name!r} is registered twice: as {_full(taken)} and as {_full(config)}; rename one")
    if taken is not None:
        _MODULES.pop(taken, None)
    if "title" not in vars(config):  # one that it inherits is another method's
        config.title = name
    METHODS[name] = config
    implement(config, method)


def implement(config: type[Config], method: type[Method]) -> None:
    """Register the module of a config that is not listed as a method."""
    _MODULES[config] = method


def all_methods() -> dict[str, type[Config]]:
    """Return the config of each known method by name, those of installed packages among them.

    Warns:
        UserNote: an installed package's method cannot be imported.
    """
    _load_installed()
    return METHODS


@cache
def _load_installed() -> None:
    """Import the modules that installed packages name, once: to find them takes long."""
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else entry.value
        _PACKAGES[entry.module.split(".")[0]] = package
        try:
            entry.load()
        except Exception as error:  # whatever somebody else's code raises
            warnings.warn(f"the methods of the package {package} cannot be used ({error})", UserNote, stacklevel=3)


def find_method(name: str, package: str = "") -> type[Config]:
    """Return the config class of a method.

    Args:
        name: The method's.
        package: Where a saved reduction says that the method comes from.

    Raises:
        UsageError: there is no such method.
    """
    known = METHODS if name in METHODS else all_methods()
    if name not in known:
        if package:
            raise UsageError(
                f"method {name!r} comes from the package {package}, which is not installed here; install it with: "
                f"pip install {package}"
            )
        near = get_close_matches(name, known, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(
            f"unknown method {name!r}{meant}; expected one of {', '.join(sorted(known))}, or one of an installed "
            "package or registered with tntprune.register_method"
        )
    return known[name]


def implementation(config: type[Config]) -> type[Method]:
    """Return the module class of a method.

    Raises:
        UsageError: the config was not registered.
    """
    if config not in _MODULES:
        raise UsageError(f"{_full(config)} is not registered; call tntprune.register_method first")
    return _MODULES[config]


def obstacle_to(kind: type[Config], layout: Layout, config: Config | None = None) -> str | None:
    """Return why a method, or one config of it, cannot be applied to a backbone, and what would do; else None."""
    reason = implementation(kind).obstacle(layout, config)
    if reason is None or reason.endswith("would do"):
        return reason
    others = [name for name, other in all_methods().items() if implementation(other).obstacle(layout) is None]
    return f"{reason}; {', '.join(others)} would do"


def package_of(config: type[Config]) -> str:
    """Return the package that a method comes from; "" for the library's own and for a program's."""
    module = config.__module__.split(".")[0]
    return "" if module in ("tntprune", "__main__") else _package_of(module)


@cache
def _package_of(module: str) -> str:
    _load_installed()
    return _PACKAGES.get(module) or next(iter(packages_distributions().get(module, [])), "")


def _full(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
