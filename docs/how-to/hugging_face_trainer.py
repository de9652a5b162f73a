"""Hugging Face Trainer

`compute_loss_func` divides by `num_items_in_batch`, so that gradient accumulation gives the
gradient of the large batch. `CriterionCallback` stores the criterion's state in checkpoints and the
head's form in the model's config; `restore_head` reads the form after `from_pretrained`.
"""

import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import largemargin as lm
from largemargin.integrations.hugging_face import CriterionCallback, compute_loss_func, restore_head


class Digits(Dataset):
    def __init__(self, part: slice) -> None:
        digits = load_digits()
        self.images = torch.as_tensor(digits.images[part], dtype=torch.float32)[:, None] / 16
        self.labels = torch.as_tensor(digits.target[part])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> dict[str, object]:
    torch.manual_seed(0)
    config = ViTConfig(  # or ViTForImageClassification.from_pretrained("google/vit-...")
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=10,
        initializer_range=0.1,
    )
    model = ViTForImageClassification(config)
    criterion = lm.attach(model, lm.CosFace(margin=0.2, scale=16.0))
    test = Digits(slice(1300, None))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                num_train_epochs=5,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=256,
                gradient_accumulation_steps=2,
                learning_rate=5e-3,
                warmup_steps=10,
                logging_steps=10,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Digits(slice(0, 1300)),
            eval_dataset=test,
            compute_metrics=accuracy,
            compute_loss_func=compute_loss_func(criterion),
            callbacks=[CriterionCallback(criterion)],
        )
        # To resume, load the model from the checkpoint as below, attach, and call
        # trainer.train(resume_from_checkpoint=checkpoint): the callback loads the criterion.
        trainer.train()
        metrics = trainer.evaluate()

        model.save_pretrained(folder)
        loaded = restore_head(ViTForImageClassification.from_pretrained(folder)).eval()
    with torch.no_grad():
        same = np.allclose(loaded(test.images).logits, model.eval()(test.images).logits, atol=1e-5)
    return {
        "accuracy": metrics["eval_accuracy"],
        "terms": {name: term.item() for name, term in criterion.terms.items()},
        "loaded model predicts the same": same,
    }


if __name__ == "__main__":
    print(main())
