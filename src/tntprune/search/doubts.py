"""Reasons not to trust a search: the photos cannot tell what it promises."""

from __future__ import annotations

from tntprune.search.budget import Budget, points
from tntprune.search.interval import least_photos
from tntprune.search.points import Point

RUINED = 20.0  # points that nobody means to lose
TRUSTED = 0.5  # rank correlation from which the two halves of the photos agree well enough


def doubts(chosen: Point, wanted: Budget, photos: int, proxy: dict[str, float]) -> list[str]:
    """List in sentences why the photos cannot judge the plan; nothing where they can.

    Args:
        chosen: The chosen schedule.
        wanted: The budget.
        photos: The number of all photos.
        proxy: See `points.proxy_error`.
    """
    found, known, most = [], chosen.overall, wanted.most_lost
    if "top1" in known and known["top1"] + known["top1_drop"] > 100 - 1e-6:
        found.append(
            f"The unpruned model is right on all {photos} photos; it was probably trained on them. It will lose more "
            "on new photos. Search on labelled photos that it has not seen."
        )
    if most is None and chosen.lost > RUINED:
        batch = " or a larger --batch-size, where tokens take more of the time" if wanted.timed else ""
        found.append(
            f"The plan loses {chosen.lost:.0f} points: nothing usable costs so little. Use a larger budget{batch}."
        )
    if most is not None and known["lost_high"] > most >= chosen.lost - 1e-9:
        least = least_photos(most)
        more = f" (at least {least} to tell {points(most)} from none)" if photos < least else ""
        found.append(
            f"{photos} photos are too few to promise at most {points(most)}: the 95 % interval of the loss is "
            f"{known['lost_low']:.2f} to {known['lost_high']:.2f}. Use more --photos{more}, or a smaller --drop."
        )
    if proxy["schedules"] > 1 and proxy["kl_rank"] < TRUSTED:
        found.append(
            f"The two halves of the photos rank the {proxy['schedules']:.0f} verified schedules differently (rank "
            f"correlation {proxy['kl_rank']:.2f}, expected {TRUSTED:g} or more). Do not trust the order of these "
            "schedules; use more --photos."
        )
    return found
