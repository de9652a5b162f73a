"""The batches a run trains on."""

from largemargin.data import Batches, Data
from largemargin.errors import LargeMarginError
from largemargin.training.config import RunConfig
from largemargin.training.processes import Processes


def training_batches(config: RunConfig, data: Data, processes: Processes) -> Batches:
    """This process's part of the training images, at least two of them in every step."""
    images, world = len(data.train), processes.world
    least = 2 * world  # batch normalisation cannot train on a single image
    if images < least:
        raise LargeMarginError(
            f"training needs at least two images for each process, {least} in all, but got "
            f"{images} (processes: {world}). Give more images, a smaller data.validation, or use "
            "fewer processes."
        )
    if config.batch_size < least:
        raise LargeMarginError(
            f"batch_size is that of all processes together and must leave each of them two images, "
            f"but {config.batch_size} was given for {world} processes. Give {least} or more."
        )
    return Batches(
        data.train,
        config.batch_size,
        device=processes.device,
        seed=config.seed,
        augment=data.augment,
        rank=processes.rank,
        world=world,
        workers=config.data.workers,
        drop_last=0 < images % config.batch_size < least,
    )
