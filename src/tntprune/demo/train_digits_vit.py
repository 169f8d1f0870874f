"""The command that rebuilds the committed weights of the demo's model.

python -m tntprune.demo.train_digits_vit --out digits_vit.safetensors
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from tqdm import tqdm

from tntprune.backbones.digits_vit import WEIGHTS, build
from tntprune.demo.digits import cluttered_digits, normalise, scans, scatter


@torch.inference_mode()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, batch: int = 250) -> float:
    """Return the top-1 accuracy in percent."""
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(batch), labels.split(batch), strict=True)
    )
    return 100 * right / len(labels)


def rebuild(out: Path = WEIGHTS, epochs: int = 400, batch: int = 128, lr: float = 2e-3, seed: int = 0) -> None:
    """Train on the training scans, freshly cluttered in every epoch, and write the weights in half precision."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build()
    images, labels = scans("train")
    optimizer = create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-5)
    held_out = cluttered_digits("test", copies=2, seed=1)
    bar = tqdm(range(epochs), unit="epoch")
    for epoch in bar:
        schedule.step(epoch)
        model.train()
        for index in torch.randperm(len(labels), generator=generator).split(batch):
            x, y = scatter(images[index], labels[index], generator, jitter=0.15)
            loss = F.cross_entropy(model(normalise(x)), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (epoch + 1) % 20 == 0:
            bar.write(f"epoch {epoch + 1}: {accuracy(model.eval(), *held_out):.1f} % on held-out scans")
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().contiguous() for name, value in model.state_dict().items()}, out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    import tyro

    tyro.cli(rebuild)
