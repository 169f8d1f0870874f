"""`tntprune export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tntprune.cli.console import tell
from tntprune.cli.flags import GROUP, HostFlags, ImgSize, Json, Model, Reduction, Weights, flag
from tntprune.errors import UsageError, UserError
from tntprune.system.flags import MAX_BATCH, Whole, Written
from tntprune.system.units import unit_of

if TYPE_CHECKING:
    from tntprune.data.photo import Photo


def export(
    model: Model,
    out: Annotated[Path, flag("file to write: .onnx, .xml (OpenVINO) or .pt2", "FILE"), Written()],
    to: Annotated[Literal["onnx", "openvino", "pt2"], flag("the format")] = "onnx",
    reduction: Annotated[Reduction, GROUP] = Reduction(),
    weights: Weights = None,
    img_size: ImgSize = None,
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"],
        flag("precision; int8 needs onnx or openvino and --data, bf16 is not for onnx"),
    ] = "fp32",
    batch_size: Annotated[int, flag("images at a time"), Whole(1, MAX_BATCH)] = 1,
    dynamic_batch: Annotated[bool, flag("accept any batch size")] = False,
    indices: Annotated[bool, flag("add an output with the grid positions of the remaining tokens")] = False,
    data: Annotated[
        Path | None,
        flag("photos to check with, and others to calibrate int8 on; class folders name the classes", "DIR"),
    ] = None,
    calibration_size: Annotated[int, flag("photos to calibrate int8 on"), Whole(1, 1_000_000)] = 128,
    check: Annotated[bool, flag("load the file and compare it with the model")] = False,
    check_size: Annotated[int, flag("number of images that --check compares"), Whole(1, 1_000_000)] = 64,
    json: Json = False,
) -> int:
    """Write a model, reduced or not, for another runtime, and beside it FILE.json: all one needs to run it."""
    from tntprune.backbones.classnames import name_classes
    from tntprune.data.folders import class_folders, classes_of
    from tntprune.exporters.check import against_fp32
    from tntprune.exporters.check import check as compare
    from tntprune.exporters.export import export as write
    from tntprune.exporters.export import files
    from tntprune.exporters.samples import choose_photos, class_list, read_photos
    from tntprune.serialization.checkpoint import files_of
    from tntprune.system.storage import check_output

    if dtype == "int8" and data is None:
        raise UsageError("--dtype int8 needs photos to measure ranges on; expected --data DIR")
    for file in files(out, to):
        check_output(file, [weights, data, *files_of(reduction.reducer)])
    built = reduction.apply(HostFlags(weights=weights, img_size=img_size).load(model))
    if data is not None and class_list(built) is None and len(names := class_folders(data)) == classes_of(built) > 0:
        name_classes(built, names)
    checked: list[Photo] = []
    used: list[Photo] = []
    if data is not None:
        wanted = calibration_size if dtype == "int8" else 0
        checked, used = choose_photos(data, check_size if check else 0, wanted)
    written = write(
        built, out, to, dtype, dynamic_batch=dynamic_batch, indices=indices, batch_size=batch_size,
        calibration=read_photos(built, used) if used else None, calibration_size=calibration_size,
        note={"model": model, "weights": weights and weights.name, "reducer": _named(reduction.reducer)},
    )  # fmt: skip
    size = sum(file.stat().st_size for file in written.files)
    told: dict[str, Any] = {"files": [str(file) for file in written.files], "bytes": size, **written.about}
    what = f"{written.about['reduction']['method'] if written.about['reduction'] else 'unpruned'}, {to} {dtype}"
    scale, unit = unit_of(written.about["macs"])
    cost = f"{written.about['macs'] / scale:.2f} {unit}"
    text = f"{model}, {what}, {cost}: {out} ({size / 1e6:.1f} MB), {written.files[-1]}"
    for key, value in written.about.get("compile_with", {}).items():
        text += f'\nload it with {{"{key}": "{value}"}}: without, OpenVINO chooses a precision of its own'
    if check:
        found = compare(built, out, read_photos(built, checked) if checked else None, check_size)
        if found.problem:
            raise UserError(f"{out}: written, but not what the model says: {found.problem}")
        told["check"] = found.to_dict()
        text += f"\n{found}"
        if used:
            apart = not set(checked) & set(used)
            told["check"] |= {"calibration_photos": len(used), "held_out": apart}
            whose = "other photos" if apart else "photo, the one checked,"
            text += f"\nint8 was calibrated on {len(used)} {whose} of {data}; "
            text += "if the model was trained on them too, it agrees less on new photos"
        if dtype != "fp32":
            pace = against_fp32(built, out, written.about)
            told["check"]["pace"] = pace._asdict()
            text += f"\n{pace}"
    tell(json, told, text)
    return 0


def _named(reducer: str | None) -> str | None:
    """Return a Hub id as it is, and the name of a folder: the JSON goes with the file, this machine's paths do not."""
    return Path(reducer).resolve().name if reducer and Path(reducer).exists() else reducer
