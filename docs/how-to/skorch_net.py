"""Large margins in skorch: `LargeMarginNet` for any loss, skorch's own class for logit losses.

pip install '.[skorch]'
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from skorch import NeuralNetClassifier
from torch import nn

import largemargin as lm
from largemargin.integrations.skorch import LargeMarginNet, softmax


class Net(nn.Module):
    """Returns logits; its last linear layer is the head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, width))
        self.fc = nn.Linear(width, 10)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(X))


def main() -> dict[str, float]:
    torch.manual_seed(0)
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    X, X_test, y, y_test = train_test_split(X, y, random_state=0, stratify=y)
    training = {"optimizer": torch.optim.Adam, "lr": 0.003, "verbose": 0}

    # skorch makes the module and LargeMarginNet attaches the loss to it: two words have changed.
    net = LargeMarginNet(Net, criterion=lm.CosFace, criterion__scale=16.0, max_epochs=8, **training)
    net.fit(X, y)
    accuracy = net.score(X_test, y_test)
    print("accuracy", accuracy, "terms", net.criterion_.terms, "head", net.module_.fc)

    # Settings of loss and module in a grid search, as for any criterion.
    search = GridSearchCV(
        net.set_params(max_epochs=3, train_split=None),
        {"criterion__margin": [0.1, 0.3], "module__width": [32]},
        cv=2,
    ).fit(X, y)
    print("best", search.best_params_, search.best_score_)

    # A loss on logits needs only the softmax, which skorch does not choose by itself.
    plain = NeuralNetClassifier(
        Net, criterion=lm.Kobayashi, predict_nonlinearity=softmax, max_epochs=4, **training
    ).fit(X, y)
    print("Kobayashi", plain.score(X_test, y_test), plain.predict_proba(X_test[:1]).round(2))
    return {"accuracy": accuracy, "margin": search.best_params_["criterion__margin"]}


if __name__ == "__main__":
    main()
