"""Models of transformers by name: `hf:` and a folder made by `save_pretrained`, or a Hub id, perhaps with @revision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tntprune.backbones.base import adapters_of, supporting
from tntprune.errors import UsageError, UserError
from tntprune.system.messages import first_line, warn
from tntprune.system.storage import check_finite

FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "model*.safetensors", "pytorch_model*.bin")


class Named:
    """A model of transformers by name, without its weights.

    Args:
        name: With `hf:` before it.

    Attributes:
        kind: The class of the model: that of its weights, or where that is not supported the encoder in it.
        config: Its config.

    Raises:
        UsageError: there is no such folder and no such id, or it holds no model that is supported.
    """

    def __init__(self, name: str) -> None:
        self.name, self.source = name, name.partition(":")[2]
        place = Path(self.source).expanduser()
        self.folder = place if self.source and place.is_dir() else None
        repo, _, revision = (str(place), "", "") if self.folder else self.source.partition("@")
        if self.folder is None and (not repo or repo[0] in "/.~"):
            raise UsageError(f"{name}: no such folder; expected hf:FOLDER made by save_pretrained, or hf:user/repo")
        self.options: dict[str, Any] = {"revision": revision or None, "trust_remote_code": False}
        self.repo = repo
        try:
            self.config: Any = transformers.AutoConfig.from_pretrained(repo, **self.options)
        except Exception as error:  # no such file, no network, not JSON, an unknown kind: each has its own
            raise UsageError(
                f"{name}: no config of a model of transformers could be read ({first_line(error)}); expected a "
                "folder made by save_pretrained, or an id on the Hub"
            ) from None
        named = list(getattr(self.config, "architectures", None) or [])
        own: Any = getattr(transformers, named[0], None) if named else None
        encoder: Any = transformers.MODEL_MAPPING.get(type(self.config), None)
        found = next((kind for kind in (own, encoder) if isinstance(kind, type) and supporting(kind)), None)
        if found is None:
            adapters: Any = adapters_of("transformers")
            families = ", ".join(title for one in adapters if not one.prompts for title in one.names)
            what = named[0] if named else type(self.config).__name__.removesuffix("Config")
            raise UsageError(f"{name}: {what} is not supported; expected a model of {families}")
        if (adapter := supporting(found)) is not None and adapter.prompts:
            raise UsageError(
                f"{name}: {found.__name__} answers prompts, which commands do not take; expected Python: "
                "tntprune.reduce_(model, ...)"
            )
        self.kind: Any = found
        if getattr(self.config, "mask_ratio", 0):
            self.config.mask_ratio = 0.0  # ViT-MAE as an encoder; it masks for its own training
        if own is not found and named:
            warn(f"{name}: {named[0]} is not supported; its {found.__name__} is taken, which gives embeddings")

    def build(self, num_classes: int | None = None) -> nn.Module:
        """Make the model with random weights, with another number of classes if that is given."""
        if num_classes is not None:
            self.config.num_labels = num_classes
        model: nn.Module = self.kind(self.config)
        return model

    def load(self) -> nn.Module:
        """Make the model with its weights, in fp32.

        Raises:
            UserError: they cannot be had, are not all there, or hold NaN or infinity.
        """
        if self.folder is None:
            warn(f"asking the Hub for {self.source}")
        try:
            model, about = self.kind.from_pretrained(
                self.repo, config=self.config, dtype=torch.float32, output_loading_info=True, **self.options
            )
        except Exception as error:  # no such file, no network, broken or other weights: each has its own
            raise UserError(
                f"{self.name}: its weights cannot be loaded ({first_line(error)}); expected those that "
                f"{self.kind.__name__}.from_pretrained takes"
            ) from None
        missing = sorted(about["missing_keys"])
        if missing and all(key.startswith("pooler.") for key in missing):
            model.pooler = None  # it was never trained; the CLS token itself is the embedding
        elif missing:
            raise UserError(
                f"{self.name}: not weights of {self.kind.__name__}: {len(missing)} tensors are missing, {missing[0]} "
                "for one"
            )
        check_finite(Path(self.source), model.state_dict())
        return model  # type: ignore[no-any-return]

    def files(self) -> list[Path]:
        """List what decides the outputs of a model in a folder, in order; nothing of a Hub id."""
        found = [] if self.folder is None else [file for pattern in FILES for file in self.folder.glob(pattern)]
        return sorted(found)
