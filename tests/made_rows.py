"""Rows as a sweep would write them, made up."""

from __future__ import annotations

from tntprune.methods import TNT, Config, Random, ToMe, TopK, to_dict
from tntprune.sweep.results import ResultRow, Setting

IMAGES = 1000
BASE = 10_000_000_000
ABOUT = {"hardware": "a <processor>", "versions": "tntprune 1, torch 2", "date": "2026-01-02", "seconds": 30.0}
KEEPS = (0.8, 0.6, 0.4, 0.2)


def made(
    config: Config | None = None,
    name: str = "unpruned",
    right: int = 800,
    macs: float = 1.0,
    scheme: str = "single",
    model: str = "vit_tiny",
    speed: float | None = 50.0,
    agreeing: int | None = None,
    images: int = IMAGES,
    busy: float | None = 0.1,
    **setting: object,
) -> ResultRow:
    """A row; `macs` is the share of the unpruned model's."""
    own = {"model": model, "weights": "a" * 64, "reducer": None, "data": "d" * 64, "images": images, **setting}
    return ResultRow(
        Setting(config=None if config is None else to_dict(config), **own),
        name, "unpruned" if config is None else scheme, images, 0, right, min(images, right + 50),
        images if config is None else right if agreeing is None else agreeing, round(macs * BASE), BASE, [196.0] * 12,
        images_per_s=speed, speedup=speed and speed / 50, peak_mib=speed and 40.0, busy=speed and busy,
        command=f"tntprune sweep {model} --methods '{name}' --data <here>", about=ABOUT,
    )  # fmt: skip


def sweep(
    model: str = "vit_tiny", speed: float | None = 50.0, keeps: tuple[float, ...] = KEEPS, **setting: object
) -> list[ResultRow]:
    """An unpruned model, and four methods at one location and at several."""
    rows = [made(model=model, speed=speed, **setting)]
    for scheme, at in (("single", 3), ("multi", (3, 4, 5))):
        for number, (name, kind) in enumerate({"TNT": TNT, "Top-K": TopK, "random <drop>": Random}.items()):
            for keep in keeps:
                fast = speed and speed * (2 - keep)
                share = 0.3 + 0.7 * keep
                right = round(800 - (60 + 60 * number) * (1 - keep))
                rows.append(made(kind(at=at, keep=keep), name, right, share, scheme, model, fast, **setting))
    rows += [made(ToMe(r=r), "ToMe", 800 - 5 * r, 1 - r / 25, "multi", model, speed, **setting) for r in (2, 8, 16)]
    return rows
