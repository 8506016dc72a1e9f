"""The command `torchgeo fit` on UC Merced, by LightningCLI."""

from pathlib import Path

from images import write_images
from record import count, note_losses
from torchgeo.datasets import UCMerced
from torchgeo.main import main

SAMPLES = {"train": 48, "val": 8}
OPTIONS = """
fit --seed_everything 1
--model torchgeo.trainers.ClassificationTask --model.model mobilenetv3_small_050 --model.num_classes 2
--data torchgeo.datamodules.UCMercedDataModule --data.batch_size 8
--trainer.max_epochs 4 --trainer.accelerator cpu --trainer.logger false --trainer.enable_progress_bar false
"""

for seed, (split, samples) in enumerate(SAMPLES.items()):
    names = []
    for kind in ("forest", "river"):
        folder = Path("data/UCMerced_LandUse/Images") / kind
        paths = write_images(folder, samples // 2, name=f"{kind}_{split}{{:02}}.tif", seed=seed)
        names += [path.name for path in paths]
    Path(f"data/uc_merced-{split}.txt").write_text("\n".join(names))
count(UCMerced, SAMPLES["train"])
note_losses()
main(OPTIONS.split())
