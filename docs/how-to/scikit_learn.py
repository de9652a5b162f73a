"""Large margins as a scikit-learn estimator: tables, images, pipelines, grid search.

pip install '.[sklearn]'
"""

from sklearn.datasets import load_digits, load_wine
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline

import largemargin as lm
from largemargin.integrations.scikit_learn import LargeMarginClassifier


def main() -> dict[str, float]:
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, random_state=0, stratify=y)

    # Tabular data. Inputs are standardised inside; an objective is a name or an object.
    model = LargeMarginClassifier(epochs=10, early_stopping=True, random_state=0).fit(X, y)
    digits = model.score(X_test, y_test)
    print("digits", digits, "sure to", model.predict_proba(X_test).max(1).mean())

    # The same rows as images, for a convolutional network, with an objective of two terms.
    objective = lm.Objective(face=lm.CosFace(scale=16.0), compact=0.1 * lm.Compactness())
    model = LargeMarginClassifier(objective, input_shape=(8, 8), epochs=3, random_state=0)
    images = model.fit(X, y).score(X_test, y_test)
    print("images", images, {name: values[-1] for name, values in model.history_.items()})

    # Its features, for another classifier.
    neighbours = KNeighborsClassifier().fit(model.transform(X), y)
    print("neighbours", neighbours.score(model.transform(X_test), y_test))

    # In a pipeline and a grid search; `objective__` reaches the settings of the loss.
    X, y = load_wine(return_X_y=True)
    pipeline = make_pipeline(PCA(0.999), LargeMarginClassifier("cosface", epochs=15))
    grid = {"largemarginclassifier__objective__margin": [0.1, 0.3]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X, y)
    print("wine", search.best_score_, search.best_params_)
    return {"digits": digits, "images": images, "wine": search.best_score_}


if __name__ == "__main__":
    main()
