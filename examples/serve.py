"""A posterior behind HTTP: raw rows in, probabilities and both uncertainties out.

    python examples/serve.py                     # trains, saves, answers one request, prints it
    uvicorn --app-dir examples serve:app         # serves what was saved

The folder holds weights, transforms and class names and no code, so the server builds nothing but the app.
"""

from pathlib import Path

import torch
from fastapi import FastAPI

import dissensus as ds

FOLDER = Path("served")


def train() -> None:
    """Two moons in millimetres: the networks see standardised columns, users never do."""
    torch.manual_seed(0)
    x, y = ds.data.two_moons(200, seed=0)
    rows = 1000 + 40 * x
    scale = ds.data.Standardiser.of_rows(rows)
    posterior = ds.DeepEnsemble([ds.nets.MLP(2, 2, hidden=(16,)) for _ in range(3)])
    ds.fit(posterior, (scale(rows), y), epochs=20, progress=False)
    ds.save(posterior, FOLDER, inputs=scale, classes=["upper", "lower"])


def make_app(folder: Path = FOLDER) -> FastAPI:
    app, posterior = FastAPI(), ds.load(folder)

    @app.post("/predict")
    def predict(rows: list[list[float]]) -> list[dict[str, object]]:
        predictive = posterior.predict(rows)
        best = predictive.mean.argmax(1).tolist()
        columns = (predictive.confidence, predictive.aleatoric, predictive.epistemic)
        return [
            {"class": posterior.classes[k], "confidence": c, "aleatoric": a, "epistemic": e}
            for k, c, a, e in zip(best, *(column.tolist() for column in columns), strict=True)
        ]

    return app


def __getattr__(name: str) -> FastAPI:
    if name != "app":
        raise AttributeError(name)
    return make_app()


if __name__ == "__main__":
    from fastapi.testclient import TestClient

    train()
    answer = TestClient(make_app()).post("/predict", json=[[1020.0, 1020.0], [1500.0, 500.0]]).json()
    for row in answer:
        print(f"{row['class']:8}{row['confidence']:8.3f}{row['aleatoric']:8.3f}{row['epistemic']:8.3f}")
